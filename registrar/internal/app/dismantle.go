package app

import (
	"errors"
	"path/filepath"

	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/identity"
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
// for another installation, and so is a CA of this machine, which others may trust.
func dismantle(pods *attach.Manager, netnsDir, stateDir string) error {
	return errors.Join(
		pods.Dismantle(),
		removePins(netnsDir),
		// The signer's key went with its namespace. With certificates and roots of before,
		// this node and one that has the new ones would refuse each other.
		identity.RemoveIssued(filepath.Join(stateDir, caFolder)),
	)
}
