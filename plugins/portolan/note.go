package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/netconf"
)

// writeNote stamps a note and puts it under its name in dir.
func (p *plugin) writeNote(dir string, note *cniv1.Note) error {
	note.UnixNanos = p.now().UnixNano()
	name, err := spool.Name(note.Key(), spool.KindOf(note))
	if err != nil {
		return err
	}
	return spool.Write(dir, name, note)
}

// removeNote removes the note of one kind about an attachment, if there is one.
func removeNote(dir string, key *cniv1.Attachment, kind spool.Kind) error {
	name, err := spool.Name(key, kind)
	if err != nil {
		return err
	}
	return spool.Remove(dir, name)
}

// isAttached reports whether ADD attached the pod, or may have: its note is there.
func isAttached(conf netconf.Config, key *cniv1.Attachment) bool {
	name, err := spool.Name(key, spool.Attached)
	if err != nil {
		return false // such a key is never attached
	}
	_, err = os.Lstat(filepath.Join(conf.NetnsDir, name))
	return !errors.Is(err, fs.ErrNotExist)
}

// isStrangers reports whether another attachment owns the pin that has this one's
// name: "a-b" with "c" reads like "a" with "b-c".
func isStrangers(conf netconf.Config, key *cniv1.Attachment) bool {
	name, err := spool.Name(key, spool.Attached)
	if err != nil {
		return false
	}
	note, err := spool.Read(conf.NetnsDir, name)
	if err != nil {
		return false
	}
	owner := note.Key()
	return owner.GetContainerId() != key.GetContainerId() || owner.GetIfname() != key.GetIfname()
}
