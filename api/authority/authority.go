package authority

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/portolan-mesh/portolan/api/port"
)

// Authority is a well-formed name of the mesh, in lower case and without the
// mesh domain. It is comparable, so it can be the key of a map.
type Authority struct {
	// Service is a DNS label.
	Service string
	// Namespace is a DNS label, or empty for the flat spelling, whose namespace
	// the reader's flat namespaces decide.
	Namespace string
	// Port is 1-65535, or 0 when the name carries none: the default port.
	Port uint16
}

// Host returns service[.namespace].domain, without the port.
func (a Authority) Host(domain string) string {
	if a.Namespace == "" {
		return a.Service + "." + domain
	}
	return a.Service + "." + a.Namespace + "." + domain
}

// HostPort returns Host, followed by ":port" when there is one. Parse reads it
// back to the same Authority.
func (a Authority) HostPort(domain string) string {
	if a.Port == 0 {
		return a.Host(domain)
	}
	return a.Host(domain) + ":" + strconv.Itoa(int(a.Port))
}

var (
	// ErrForeign marks a name outside the mesh domain: DNS forwards it, HTTP
	// answers 404.
	ErrForeign = errors.New("not under the mesh domain")
	// ErrBadForm marks a name under the mesh domain, or the domain itself, that
	// is no service[.namespace].domain[:port]: DNS says NXDOMAIN, HTTP 404.
	ErrBadForm = errors.New("not of the form service[.namespace].domain[:port]")
)

// Error says why Parse refused a name. errors.Is tells its Kind.
type Error struct {
	// Name is what was given, whole.
	Name string
	// Kind is ErrForeign or ErrBadForm.
	Kind error
	// Reason is what is wrong, for people. Empty for a foreign name.
	Reason string
}

// Error returns name, kind and reason; a long name is cut.
func (e *Error) Error() string {
	name := e.Name
	if len(name) > maxName {
		name = name[:maxName] + "..."
	}
	if e.Reason == "" {
		return fmt.Sprintf("authority %q: %v", name, e.Kind)
	}
	return fmt.Sprintf("authority %q: %v: %s", name, e.Kind, e.Reason)
}

// Unwrap returns the kind.
func (e *Error) Unwrap() error { return e.Kind }

// Parse reads s as a name of the mesh whose domain is domain (one that
// ValidateDomain accepts). ASCII letters of either case are the same; one
// trailing dot of the host is accepted, as HTTP clients send it before the port.
// Everything else is strict: the port is 1-65535 without sign, blank or leading
// zero, and labels are DNS labels. The error is an *Error.
func Parse(s, domain string) (Authority, error) {
	host, portText, hasPort := strings.Cut(s, ":")
	bare := strings.TrimRight(host, ".")
	labels, ok := cutDomain(bare, domain)
	if !ok {
		return Authority{}, &Error{Name: s, Kind: ErrForeign}
	}
	bad := func(reason string) (Authority, error) {
		return Authority{}, &Error{Name: s, Kind: ErrBadForm, Reason: reason}
	}
	a := Authority{}
	switch service, namespace, two := strings.Cut(labels, "."); {
	case len(host)-len(bare) > 1:
		return bad("more than one trailing dot")
	case labels == "":
		return bad("it names no service")
	case strings.Contains(namespace, "."):
		return bad("more than two labels before the domain")
	case !validFold(service):
		return bad("the service is no DNS label")
	case two && !validFold(namespace):
		return bad("the namespace is no DNS label")
	default:
		a.Service, a.Namespace = lower(service), lower(namespace)
	}
	if hasPort {
		n, err := port.ParseNumber(portText)
		if err != nil {
			return bad(err.Error())
		}
		a.Port = n
	}
	return a, nil
}

// cutDomain returns what stands before ".domain" in host, and whether host is
// the domain or under it.
func cutDomain(host, domain string) (labels string, ok bool) {
	n := len(host) - len(domain)
	if n < 0 || !equalFold(host[n:], domain) {
		return "", false
	}
	if n == 0 {
		return "", true
	}
	if host[n-1] != '.' {
		return "", false
	}
	return host[:n-1], true
}

// lower is strings.ToLower for ASCII only: the Unicode one maps the Kelvin sign
// to k, which would let two different byte strings name one service.
func lower(s string) string {
	for i := range len(s) {
		if 'A' <= s[i] && s[i] <= 'Z' {
			b := []byte(s)
			for j := i; j < len(b); j++ {
				b[j] = lowerByte(b[j])
			}
			return string(b)
		}
	}
	return s
}

func lowerByte(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + ('a' - 'A')
	}
	return c
}

// equalFold compares s with a lower-case text, ASCII letters of either case alike.
func equalFold(s, lowered string) bool {
	if len(s) != len(lowered) {
		return false
	}
	for i := range len(s) {
		if lowerByte(s[i]) != lowered[i] {
			return false
		}
	}
	return true
}
