package identity

import (
	"log/slog"
	"os"
	"path/filepath"
)

// RootStore keeps the roots of a CA, with their keys, as one value: it is replaced as
// a whole or not at all. The CA calls one method at a time.
type RootStore interface {
	// Load returns what was saved; fs.ErrNotExist when there is nothing.
	Load() ([]byte, error)
	// Save returns once data survives a power cut. It fails when somebody else saved
	// since the last Load or Save.
	Save(data []byte) error
	// SetAside keeps a copy of damaged data under another name, which it returns, so
	// that a key can be recovered by hand; afterwards there is nothing to Load.
	SetAside() (name string, err error)
	// Where says for people where the roots are.
	Where() string
}

// caFile is the name of the roots' file in the CA's folder.
const caFile = "ca.pem"

// rootFile is the RootStore of one machine.
type rootFile struct {
	path  string
	clock Clock
	log   *slog.Logger
}

func openRootFile(dir string, clock Clock, log *slog.Logger) (*rootFile, error) {
	if err := ensurePrivateDir(dir, log); err != nil {
		return nil, err
	}
	f := &rootFile{path: filepath.Join(dir, caFile), clock: clock, log: log}
	return f, removeTemporary(f.path)
}

// Load implements RootStore.
func (f *rootFile) Load() ([]byte, error) {
	data, err := os.ReadFile(f.path)
	if err != nil {
		return nil, err
	}
	return data, ensurePrivateFile(f.path, f.log)
}

// Save implements RootStore.
func (f *rootFile) Save(data []byte) error { return writeFile(f.path, data, durable) }

// SetAside implements RootStore.
func (f *rootFile) SetAside() (string, error) {
	aside := f.path + ".corrupt-" + f.clock().UTC().Format("20060102T150405Z")
	return aside, os.Rename(f.path, aside)
}

// Where implements RootStore.
func (f *rootFile) Where() string { return f.path }
