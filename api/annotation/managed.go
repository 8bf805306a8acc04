package annotation

// Managed is a word on joining the mesh.
type Managed uint8

// The words. The zero value says nothing.
const (
	// Unset says nothing.
	Unset Managed = iota
	// Joined asks for the mesh.
	Joined
	// Out stays out.
	Out
)

// String returns "unset", "joined" or "out".
func (m Managed) String() string {
	switch m {
	case Joined:
		return "joined"
	case Out:
		return "out"
	case Unset:
	}
	return "unset"
}

// ParseManaged reads the value of aether.io/managed: of the annotation, or of
// the label of the same name on a pod or a namespace. The error is an *Error.
func ParseManaged(value string) (Managed, error) {
	managed, err := parseManaged(value)
	if err != nil {
		return Unset, err
	}
	return managed, nil
}

func parseManaged(value string) (Managed, *Error) {
	switch value {
	case "true":
		return Joined, nil
	case "false":
		return Out, nil
	}
	return Unset, &Error{
		Key: KeyManaged, Value: value,
		Problem: `neither "true" nor "false"`, Remedy: `write "true" to join the mesh, "false" to stay out`,
	}
}

// OptIn returns the pod's own word on joining, and looks at no other value: Out
// for managed "false"; Joined for any other value of managed, or when either port
// annotation is there; else Unset. It is what the plugin evaluates at ADD
// (contract 4.1). A managed that is neither "true" nor "false" counts as Joined,
// so that the pod is refused by Parse and not started half-meshed.
func OptIn(annotations map[string]string) Managed {
	if value, ok := annotations[KeyManaged]; ok {
		if value == "false" {
			return Out
		}
		return Joined
	}
	_, one := annotations[KeyPort]
	_, many := annotations[KeyPorts]
	if one || many {
		return Joined
	}
	return Unset
}
