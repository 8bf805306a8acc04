package spool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// Kind says what a note is about; it is the suffix of the file's name.
type Kind string

// The kinds of notes.
const (
	// Attached lies beside the netns pin while the pod is attached.
	Attached Kind = "attached"
	// Unmeshed says that a pod was started without the mesh (contract 5).
	Unmeshed Kind = "unmeshed"
	// Deleted says that a DEL could not be delivered (CNI-D1).
	Deleted Kind = "deleted"
)

// suffix returns the end of the file names of a kind.
func (k Kind) suffix() string { return "." + string(k) + ".json" }

// maxNote bounds what Scan reads of one file: the largest valid AddRequest with
// every byte escaped in JSON.
const maxNote = 2 << 20

// tempPrefix begins the name of a note that is being written.
const tempPrefix = ".portolan-note-"

// KindOf returns what a note is about, "" for an empty note.
func KindOf(note *cniv1.Note) Kind {
	switch note.GetWhat().(type) {
	case *cniv1.Note_Attached:
		return Attached
	case *cniv1.Note_Unmeshed:
		return Unmeshed
	case *cniv1.Note_Deleted:
		return Deleted
	}
	return ""
}

// Name returns the file name of the note of one kind for an attachment:
// <containerID>-<ifname>.<kind>.json. A key that is not valid, or that would make
// the name of a pin look like a note's, is refused (C3).
func Name(key *cniv1.Attachment, kind Kind) (string, error) {
	base, err := Base(key)
	if err != nil {
		return "", err
	}
	return base + kind.suffix(), nil
}

// Base returns <containerID>-<ifname>, the name of the netns pin, by the rules of Name.
func Base(key *cniv1.Attachment) (string, error) {
	if err := key.Validate(); err != nil {
		return "", fmt.Errorf("file name of an attachment: %w", err)
	}
	base := key.GetContainerId() + "-" + key.GetIfname()
	if strings.HasSuffix(base, ".json") {
		return "", fmt.Errorf("file name of an attachment: ifname %q ends like a note: use a name without .json", key.GetIfname())
	}
	return base, nil
}

// kindOfName returns the kind that a file name claims; false for a name that is
// no note's.
func kindOfName(name string) (Kind, bool) {
	for _, k := range []Kind{Attached, Unmeshed, Deleted} {
		if base, ok := strings.CutSuffix(name, k.suffix()); ok && base != "" && base[0] != '.' {
			return k, true
		}
	}
	return "", false
}

// Write puts a note on disk under name, which must be the note's own (Name). It
// replaces an older note of that name in one step and survives a power cut once
// it returned. The folder is made, mode 0700, when it is missing; the note has
// mode 0600.
func Write(dir, name string, note *cniv1.Note) error {
	if err := note.Validate(); err != nil {
		return fmt.Errorf("write note %s: %w", name, err)
	}
	want, err := Name(note.Key(), KindOf(note))
	if err != nil {
		return fmt.Errorf("write note %s: %w", name, err)
	}
	if name != want {
		return fmt.Errorf("write note %s: its content belongs under %s", name, want)
	}
	text, err := protojson.Marshal(note)
	if err != nil {
		return fmt.Errorf("write note %s: %w", name, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("write note %s: %w", name, err)
	}
	if err := replaceFile(filepath.Join(dir, name), append(text, '\n')); err != nil {
		return fmt.Errorf("write note %s: %w", name, err)
	}
	return nil
}

// replaceFile writes path by way of a synced temporary file in the same folder.
func replaceFile(path string, text []byte) error {
	dir := filepath.Dir(path)
	temp, err := os.CreateTemp(dir, tempPrefix+"*") // mode 0600
	if err != nil {
		return err
	}
	_, err = temp.Write(text)
	if err == nil {
		err = temp.Sync()
	}
	if e := temp.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return syncDir(dir)
}

// syncDir makes a rename or removal in dir durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Remove deletes a note. One that is not there is success.
func Remove(dir, name string) error {
	if _, ok := kindOfName(name); !ok || name != filepath.Base(name) {
		return fmt.Errorf("remove note %q: not the name of a note", name)
	}
	switch err := os.Remove(filepath.Join(dir, name)); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("remove note: %w", err)
	}
	if err := syncDir(dir); err != nil {
		return fmt.Errorf("remove note %s: %w", name, err)
	}
	return nil
}
