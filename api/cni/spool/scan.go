package spool

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// staleTemp is the age from which a temporary file has no writer any more: a
// plugin lives seconds.
const staleTemp = 10 * time.Minute

// Entry is one note on disk.
type Entry struct {
	// Name of the file in the folder, for Remove.
	Name string
	// Kind of the note.
	Kind Kind
	// Note is valid, and belongs under Name.
	Note *cniv1.Note
}

// UnreadableError says that a file that should be a note is none. Scan moved it
// out of the way, so that it is reported once and can be looked at.
type UnreadableError struct {
	// Path is where the file was.
	Path string
	// Aside is where it is now; empty when it could not be moved.
	Aside string
	// Err says what is wrong with it.
	Err error
}

// Error names both paths.
func (e *UnreadableError) Error() string {
	if e.Aside == "" {
		return fmt.Sprintf("note %s is unreadable and could not be moved: remove it: %v", e.Path, e.Err)
	}
	return fmt.Sprintf("note %s is unreadable, set aside as %s: %v", e.Path, e.Aside, e.Err)
}

// Unwrap returns the cause.
func (e *UnreadableError) Unwrap() error { return e.Err }

// Read returns the note of that name. One that is not there is fs.ErrNotExist.
func Read(dir, name string) (*cniv1.Note, error) {
	kind, ok := kindOfName(name)
	if !ok || name != filepath.Base(name) {
		return nil, fmt.Errorf("read note %q: not the name of a note", name)
	}
	note, err := readNote(filepath.Join(dir, name), name, kind)
	if err != nil {
		return nil, fmt.Errorf("read note %s: %w", name, err)
	}
	return note, nil
}

// Scan returns the notes in dir, oldest first. Files that are not notes by their
// name, and anything that is no regular file (pins are mounts), are ignored. A
// note that cannot be read is set aside under <name>.unreadable and reported as
// an *UnreadableError in the joined error; the entries are valid all the same. A
// folder that is not there has no notes.
func Scan(dir string) ([]Entry, error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("scan notes: %w", err)
	}
	var entries []Entry
	var errs []error
	for _, f := range files {
		if strings.HasPrefix(f.Name(), tempPrefix) {
			sweepTemp(dir, f)
			continue
		}
		kind, ok := kindOfName(f.Name())
		if !ok || !f.Type().IsRegular() {
			continue
		}
		path := filepath.Join(dir, f.Name())
		note, err := readNote(path, f.Name(), kind)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, errForeign):
			// Removed since ReadDir, or a mount: not ours to judge.
		case err != nil:
			errs = append(errs, setAside(path, err))
		default:
			entries = append(entries, Entry{Name: f.Name(), Kind: kind, Note: note})
		}
	}
	slices.SortFunc(entries, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Note.GetUnixNanos(), b.Note.GetUnixNanos()), cmp.Compare(a.Name, b.Name))
	})
	return entries, errors.Join(errs...)
}

// errForeign marks a file that cannot be a note whatever its name.
var errForeign = errors.New("no regular file")

// readNote reads and checks one file. It never blocks on a FIFO and never
// follows a link: the folder is ours, but what lies in it is judged all the same.
func readNote(path, name string, kind Kind) (*cniv1.Note, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, errForeign
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var fst unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fst); err != nil {
		return nil, fmt.Errorf("fstatfs: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || fst.Type == unix.NSFS_MAGIC {
		return nil, errForeign
	}
	text, err := io.ReadAll(io.LimitReader(f, maxNote+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxNote {
		return nil, fmt.Errorf("%d bytes, at most %d are read", info.Size(), maxNote)
	}
	return parse(text, name, kind)
}

// parse turns a file's text into the note that belongs under name.
func parse(text []byte, name string, kind Kind) (*cniv1.Note, error) {
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, errors.New("empty file")
	}
	var note cniv1.Note
	// A note of a newer plugin may carry fields that this binary does not know.
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(text, &note); err != nil {
		return nil, err
	}
	if err := note.Validate(); err != nil {
		return nil, err
	}
	want, err := Name(note.Key(), KindOf(&note))
	if err != nil {
		return nil, err
	}
	if want != name || KindOf(&note) != kind {
		return nil, fmt.Errorf("its content belongs under %s", want)
	}
	return &note, nil
}

// setAside moves a file out of the way of later scans. A second bad file of the
// same name replaces the first: the folder cannot grow by it.
func setAside(path string, cause error) error {
	aside := path + ".unreadable"
	if err := os.Rename(path, aside); err != nil {
		return &UnreadableError{Path: path, Err: errors.Join(cause, err)}
	}
	return &UnreadableError{Path: path, Aside: aside, Err: cause}
}

// sweepTemp removes what a killed writer left.
func sweepTemp(dir string, f fs.DirEntry) {
	if info, err := f.Info(); err == nil && time.Since(info.ModTime()) > staleTemp {
		_ = os.Remove(filepath.Join(dir, f.Name()))
	}
}
