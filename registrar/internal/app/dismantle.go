package app

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/portolan-mesh/portolan/registrar/internal/attach"
)

// What is in the state folder.
const (
	// stateFile has what is attached, registered and named.
	stateFile = "state.db"
	// caFolder has certificates, roots and keys.
	caFolder = "ca"
)

// dismantle takes away what the mesh leaves on a node that it is removed from for
// good, as attach.Manager.Dismantle says. What names and addresses services have is kept
// for another installation.
func dismantle(pods *attach.Manager, netnsDir, stateDir string) error {
	return errors.Join(
		pods.Dismantle(),
		removePins(netnsDir),
		// The signer's key went with its namespace. With certificates and roots of before,
		// this node and one that has the new ones would refuse each other.
		os.RemoveAll(filepath.Join(stateDir, caFolder)),
	)
}
