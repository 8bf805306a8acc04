package table

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"google.golang.org/protobuf/encoding/protojson"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
)

const (
	// fileVersion is the layout of the file. Fields that are added do not change
	// it: readers ignore what they do not know.
	fileVersion = 1
	// maxFile bounds what is read, in bytes: more than the largest table needs.
	maxFile = 128 << 20
	// setAsideSuffix is added to the name of a file that cannot be used.
	setAsideSuffix = ".corrupt"
)

// File is where the last table outlives the process (contract 7: dns.json).
type File struct {
	// Path of the file, in a directory that exists.
	Path string
}

// envelope is the file's content.
type envelope struct {
	Version int             `json:"version"`
	Table   json.RawMessage `json:"table"`
}

// CorruptError says that the file could not be used and was set aside.
type CorruptError struct {
	// Path of the file that was not usable.
	Path string
	// Aside is where it is now; empty when it could not be moved.
	Aside string
	// Err is what is wrong with it.
	Err error
}

// Error names both files.
func (e *CorruptError) Error() string {
	if e.Aside == "" {
		return fmt.Sprintf("table file %s is not usable and could not be set aside, starting empty: %v", e.Path, e.Err)
	}
	return fmt.Sprintf("table file %s is not usable, set aside as %s, starting empty: %v", e.Path, e.Aside, e.Err)
}

// Unwrap returns what is wrong with the file.
func (e *CorruptError) Unwrap() error { return e.Err }

// Load reads the last table. Nil and no error when there is none. A file that is
// not usable is renamed, so that it is neither lost nor read again, and reported
// as *CorruptError; the caller starts empty. Any other error is of the disk.
func (f File) Load() (*dnsv1.Table, error) {
	data, err := f.read()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil && !errors.Is(err, errTooLarge) {
		return nil, fmt.Errorf("read table file %s: %w", f.Path, err)
	}
	if err == nil {
		var t *dnsv1.Table
		if t, err = decode(data); err == nil {
			return t, nil
		}
	}
	aside := f.Path + setAsideSuffix
	if renameErr := os.Rename(f.Path, aside); renameErr != nil {
		return nil, &CorruptError{Path: f.Path, Err: errors.Join(err, renameErr)}
	}
	return nil, &CorruptError{Path: f.Path, Aside: aside, Err: err}
}

// errTooLarge is the error of a file that no table of ours can be.
var errTooLarge = fmt.Errorf("larger than %d bytes", maxFile)

func (f File) read() ([]byte, error) {
	r, err := os.Open(f.Path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	info, err := r.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > maxFile {
		return nil, errTooLarge
	}
	return io.ReadAll(io.LimitReader(r, maxFile))
}

func decode(data []byte) (*dnsv1.Table, error) {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, fmt.Errorf("parse: %w", err)
	}
	if e.Version != fileVersion {
		return nil, fmt.Errorf("version %d, this program reads version %d", e.Version, fileVersion)
	}
	t := &dnsv1.Table{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(e.Table, t); err != nil {
		return nil, fmt.Errorf("parse table: %w", err)
	}
	if err := t.Validate(); err != nil {
		return nil, fmt.Errorf("check table: %w", err)
	}
	return t, nil
}

// Save replaces the file as a whole: a reader, also after a crash, finds the old
// table or the new one. Mode 0600.
func (f File) Save(t *dnsv1.Table) error {
	body, err := protojson.Marshal(t)
	if err != nil {
		return fmt.Errorf("encode table: %w", err)
	}
	data, err := json.Marshal(envelope{Version: fileVersion, Table: body})
	if err != nil {
		return fmt.Errorf("encode table file: %w", err)
	}
	if err := f.write(append(data, '\n')); err != nil {
		return fmt.Errorf("write table file %s: %w", f.Path, err)
	}
	return nil
}

func (f File) write(data []byte) (err error) {
	dir := filepath.Dir(f.Path)
	// A fixed name: what a crash left behind is overwritten, not collected.
	tmp := f.Path + ".tmp"
	w, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = w.Write(data)
	if err == nil {
		err = w.Sync()
	}
	if closeErr := w.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(tmp, f.Path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return syncDir(dir)
}

// syncDir makes the rename outlive a power failure.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	return errors.Join(err, d.Close())
}
