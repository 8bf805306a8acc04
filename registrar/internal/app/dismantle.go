package app

import (
	"errors"
	"os"
	"path/filepath"
)

// caFolder is where, in the state folder, certificates and roots are.
const caFolder = "ca"

// dismantle takes away what the mesh leaves on a node that it is removed from for
// good. What names and addresses services have is kept for another installation.
func (d *daemon) dismantle() error {
	err := d.pods.Dismantle()
	if d.cluster == nil {
		return err // the CA is the machine's own
	}
	// The signer's key went with its namespace. With certificates and roots of before,
	// this node and one that has the new ones would refuse each other.
	return errors.Join(err, os.RemoveAll(filepath.Join(d.cfg.StateDir, caFolder)))
}
