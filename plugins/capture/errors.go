package capture

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrNoTable says that a namespace has no table of ours: it was never applied, or
// somebody flushed it. Apply puts it (back).
var ErrNoTable = errors.New("table inet " + Table + " is missing")

// MissingError is the finding of Verify: something that Apply programmed is gone
// or was changed. CHECK answers it with CNI code 100 (CNI-57).
type MissingError struct {
	// NetNS is the namespace's path.
	NetNS string
	// Kind is "table", "chain", "rule", "set", "element" or "route".
	Kind string
	// Name says which one.
	Name string
}

// Error names kind and name, and the remedy.
func (e *MissingError) Error() string {
	return fmt.Sprintf("%s %s is missing or changed in %s: delete the pod, or let the registrar repair it", e.Kind, e.Name, e.NetNS)
}

// Is makes a missing table equal to ErrNoTable.
func (e *MissingError) Is(target error) bool { return target == ErrNoTable && e.Kind == "table" }

// FeatureError says that the kernel lacks something that the capture needs (CNI
// code 104, CNI-51).
type FeatureError struct {
	// Feature names it in nft's words.
	Feature string
	// Err is the kernel's answer.
	Err error
}

// Error names the feature and the remedy.
func (e *FeatureError) Error() string {
	return fmt.Sprintf("kernel lacks %s: load or build its module: %v", e.Feature, e.Err)
}

// Unwrap returns the kernel's answer.
func (e *FeatureError) Unwrap() error { return e.Err }

// lacksFeature reports whether an error is what nftables answers to an
// expression, type or hook that the kernel does not have.
func lacksFeature(err error) bool {
	for _, errno := range []error{unix.ENOENT, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EINVAL} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}
