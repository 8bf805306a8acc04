package identity

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
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

// RemoveIssued removes what a CA's folder has besides the CA itself: certificates, their
// keys, and the roots that others gave. The roots of a CA of this machine stay, with the
// copies that were set aside; without any the folder goes as well.
func RemoveIssued(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var kept bool
	errs := []error{err}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), caFile) {
			kept = true
			continue
		}
		errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	if !kept {
		errs = append(errs, os.RemoveAll(dir))
	}
	return errors.Join(errs...)
}

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
