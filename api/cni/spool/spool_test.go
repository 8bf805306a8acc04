package spool_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

func key(id string) *cniv1.Attachment {
	return &cniv1.Attachment{ContainerId: id, Ifname: "eth0"}
}

func deleted(id string, nanos int64) *cniv1.Note {
	return &cniv1.Note{UnixNanos: nanos, What: &cniv1.Note_Deleted{
		Deleted: &cniv1.DelRequest{Attachment: key(id), Network: "net"},
	}}
}

func request(id string) *cniv1.AddRequest {
	return &cniv1.AddRequest{
		Attachment: key(id), Network: "net", Netns: "/run/portolan/netns/" + id + "-eth0",
		Addresses: []string{"10.0.0.2"}, Annotations: map[string]string{"k": "v\n\"é"}, AnnotationsKnown: true,
	}
}

func mustWrite(t *testing.T, dir string, note *cniv1.Note) string {
	t.Helper()
	name, err := spool.Name(note.Key(), spool.KindOf(note))
	if err != nil {
		t.Fatal(err)
	}
	if err := spool.Write(dir, name, note); err != nil {
		t.Fatal(err)
	}
	return name
}

// Every kind of note comes back as it was written, oldest first; the folder is
// made 0700 and the files are 0600: they hold pod annotations.
func TestWriteScan(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "spool")
	notes := []*cniv1.Note{
		deleted("c2", 30),
		{UnixNanos: 10, What: &cniv1.Note_Attached{Attached: request("c1")}},
		{UnixNanos: 20, What: &cniv1.Note_Unmeshed{Unmeshed: request("c3")}},
		deleted("c0", 30),
	}
	for _, n := range notes {
		mustWrite(t, dir, n)
	}
	got, err := spool.Scan(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []spool.Entry{
		{Name: "c1-eth0.attached.json", Kind: spool.Attached, Note: notes[1]},
		{Name: "c3-eth0.unmeshed.json", Kind: spool.Unmeshed, Note: notes[2]},
		{Name: "c0-eth0.deleted.json", Kind: spool.Deleted, Note: notes[3]},
		{Name: "c2-eth0.deleted.json", Kind: spool.Deleted, Note: notes[0]},
	}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("Scan (-want +got):\n%s", d)
	}
	read, err := spool.Read(dir, "c1-eth0.attached.json")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(notes[1], read, protocmp.Transform()); d != "" {
		t.Errorf("Read (-want +got):\n%s", d)
	}
	for path, mode := range map[string]fs.FileMode{dir: 0o700 | fs.ModeDir, filepath.Join(dir, "c1-eth0.attached.json"): 0o600} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != mode {
			t.Errorf("%s has mode %v, want %v", path, info.Mode(), mode)
		}
	}
}

// Writing twice replaces, removing twice is success, and neither leaves other
// files behind: a repeated DEL must not grow the spool.
func TestIdempotent(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir, deleted("c1", 1))
	name := mustWrite(t, dir, deleted("c1", 2))
	got, err := spool.Scan(dir)
	if err != nil || len(got) != 1 || got[0].Note.GetUnixNanos() != 2 {
		t.Fatalf("after two writes: %v, %v, want the second note alone", got, err)
	}
	for range 2 {
		if err := spool.Remove(dir, name); err != nil {
			t.Fatal(err)
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
	if got, err := spool.Scan(filepath.Join(dir, "none")); err != nil || got != nil {
		t.Errorf("Scan of a folder that is not there = %v, %v", got, err)
	}
	if _, err := spool.Read(dir, name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Read of a removed note = %v, want fs.ErrNotExist", err)
	}
}

// What could leave the folder, or look like another file of it, never becomes a
// file name (C3).
func TestNames(t *testing.T) {
	for _, tc := range []struct {
		name string
		key  *cniv1.Attachment
		kind spool.Kind
		want string
	}{
		{"plain", key("c1"), spool.Deleted, "c1-eth0.deleted.json"},
		{"dots and dashes", &cniv1.Attachment{ContainerId: "a.b-c_d", Ifname: "eth0.100"}, spool.Unmeshed, "a.b-c_d-eth0.100.unmeshed.json"},
		{"slash", key("../../etc/c1"), spool.Deleted, ""},
		{"dot", key(".hidden"), spool.Deleted, ""},
		{"empty", key(""), spool.Deleted, ""},
		{"missing", nil, spool.Deleted, ""},
		{"ifname parent", &cniv1.Attachment{ContainerId: "c1", Ifname: ".."}, spool.Deleted, ""},
		{"ifname slash", &cniv1.Attachment{ContainerId: "c1", Ifname: "../x"}, spool.Deleted, ""},
		{"pin that looks like a note", &cniv1.Attachment{ContainerId: "c1", Ifname: "a.attached.json"}, spool.Deleted, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := spool.Name(tc.key, tc.kind)
			if got != tc.want || (err == nil) != (tc.want != "") {
				t.Errorf("Name = %q, %v, want %q", got, err, tc.want)
			}
		})
	}
	dir := t.TempDir()
	if err := spool.Write(dir, "c2-eth0.deleted.json", deleted("c1", 1)); err == nil {
		t.Error("a note was written under another attachment's name")
	}
	if err := spool.Write(dir, "c1-eth0.attached.json", deleted("c1", 1)); err == nil {
		t.Error("a note was written under another kind's name")
	}
	if err := spool.Write(dir, "c1-eth0.deleted.json", &cniv1.Note{UnixNanos: 1}); err == nil {
		t.Error("an empty note was written")
	}
	for _, name := range []string{"../c1-eth0.deleted.json", "/etc/passwd", "x", ".deleted.json", "a/b.deleted.json"} {
		if err := spool.Remove(dir, name); err == nil {
			t.Errorf("Remove(%q) is accepted", name)
		}
		if _, err := spool.Read(dir, name); err == nil || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Read(%q) = %v, want a refusal", name, err)
		}
	}
}

// Foreign files are ignored and stay; a note that cannot be read is set aside
// once, named in the error, and the readable ones are returned all the same
// (MESH-42: ignore what is not ours).
func TestScanSetsAside(t *testing.T) {
	dir := t.TempDir()
	mustWrite(t, dir, deleted("good", 1))
	moved := mustWrite(t, dir, deleted("moved", 1))
	text, err := os.ReadFile(filepath.Join(dir, moved))
	if err != nil {
		t.Fatal(err)
	}
	bad := map[string]string{
		"half-eth0.deleted.json":   string(text[:len(text)/2]),
		"empty-eth0.deleted.json":  "",
		"text-eth0.deleted.json":   "hello",
		"wrong-eth0.deleted.json":  string(text), // another attachment's note
		"moved-eth0.attached.json": string(text), // another kind
		"none-eth0.unmeshed.json":  `{"unixNanos":"1"}`,
		"big-eth0.deleted.json":    strings.Repeat(" ", 2<<20) + string(text),
	}
	foreign := []string{"README", "c1-eth0", "x.json", "a-eth0.deleted.json.unreadable", ".deleted.json"}
	for name, content := range bad {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range foreign {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "dir-eth0.deleted.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/hostname", filepath.Join(dir, "link-eth0.deleted.json")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "fifo-eth0.deleted.json"), 0o600); err != nil {
		t.Fatal(err)
	}
	entries, err := spool.Scan(dir)
	if len(entries) != 2 || entries[0].Name != "good-eth0.deleted.json" || entries[1].Name != moved {
		t.Errorf("readable notes = %v, want good and moved", entries)
	}
	for name := range bad {
		if err == nil || !strings.Contains(err.Error(), "note "+filepath.Join(dir, name)+" is unreadable, set aside as ") {
			t.Errorf("the error does not name %s: %v", name, err)
		}
		if _, e := os.Stat(filepath.Join(dir, name+".unreadable")); e != nil {
			t.Errorf("%s was not set aside: %v", name, e)
		}
	}
	if _, ok := errors.AsType[*spool.UnreadableError](err); !ok {
		t.Errorf("%T holds no *UnreadableError", err)
	}
	for _, name := range append(foreign, "dir-eth0.deleted.json", "link-eth0.deleted.json", "fifo-eth0.deleted.json") {
		if _, e := os.Lstat(filepath.Join(dir, name)); e != nil {
			t.Errorf("foreign %s is gone: %v", name, e)
		}
	}
	if again, err := spool.Scan(dir); err != nil || len(again) != 2 {
		t.Errorf("second Scan = %d notes, %v, want 2 and no error", len(again), err)
	}
}

// A note with fields of a newer version is read: plugin and registrar are
// updated one after the other.
func TestScanNewerNote(t *testing.T) {
	dir := t.TempDir()
	text := `{"unixNanos":"5","deleted":{"attachment":{"containerId":"c1","ifname":"eth0","color":"red"},"network":"net"},"reason":"x"}`
	if err := os.WriteFile(filepath.Join(dir, "c1-eth0.deleted.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := spool.Scan(dir)
	if err != nil || len(got) != 1 {
		t.Fatalf("Scan = %v, %v", got, err)
	}
	if d := cmp.Diff(deleted("c1", 5), got[0].Note, protocmp.Transform()); d != "" {
		t.Error(d)
	}
}

// What a killed writer left is removed once it is old; a file that is being
// written is not touched.
func TestScanSweepsTemporaryFiles(t *testing.T) {
	dir := t.TempDir()
	old, fresh := filepath.Join(dir, ".portolan-note-1"), filepath.Join(dir, ".portolan-note-2")
	for _, path := range []string{old, fresh} {
		if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	past := time.Now().Add(-time.Hour)
	if err := os.Chtimes(old, past, past); err != nil {
		t.Fatal(err)
	}
	if got, err := spool.Scan(dir); err != nil || got != nil {
		t.Fatalf("Scan = %v, %v", got, err)
	}
	if _, err := os.Stat(old); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("old temporary file: %v, want it removed", err)
	}
	if _, err := os.Stat(fresh); err != nil {
		t.Errorf("fresh temporary file: %v, want it kept", err)
	}
}

// A reader that scans while notes are written and removed meets only whole
// notes: the write is one rename.
func TestScanMeetsWholeNotes(t *testing.T) {
	dir := t.TempDir()
	stop := make(chan struct{})
	var writers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			note := deleted(fmt.Sprintf("c%d", w), 1)
			name, err := spool.Name(note.Key(), spool.Deleted)
			if err != nil {
				t.Error(err)
			}
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := errors.Join(spool.Write(dir, name, note), spool.Remove(dir, name)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 500 {
		if _, err := spool.Scan(dir); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	writers.Wait()
}

// A write that fails says which note and why, and leaves nothing.
func TestWriteFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := spool.Write(file, "c1-eth0.deleted.json", deleted("c1", 1))
	if err == nil || !strings.Contains(err.Error(), "c1-eth0.deleted.json") || !strings.Contains(err.Error(), file) {
		t.Errorf("Write into a file = %v, want an error that names note and path", err)
	}
	// The name's place is taken by a folder: the rename fails, the temporary file goes.
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "c1-eth0.deleted.json", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := spool.Write(dir, "c1-eth0.deleted.json", deleted("c1", 1)); err == nil {
		t.Error("Write over a folder is accepted")
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left in the folder: %v, %v, want the folder alone", left, err)
	}
}

// FuzzScan proves that no content of a file breaks Scan, and that what it
// returns is valid and belongs under its name.
func FuzzScan(f *testing.F) {
	f.Add([]byte(`{"unixNanos":"5","deleted":{"attachment":{"containerId":"c1","ifname":"eth0"},"network":"net"}}`))
	f.Add([]byte(`{"unixNanos":"5","deleted":{"attachment":{"containerId":"c2","ifname":"eth0"},"network":"net"}}`))
	f.Add([]byte(`{"deleted":null}`))
	f.Add([]byte("\x00"))
	f.Fuzz(func(t *testing.T, content []byte) {
		dir := t.TempDir()
		name := "c1-eth0.deleted.json"
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
		entries, err := spool.Scan(dir)
		if (err == nil) != (len(entries) == 1) {
			t.Fatalf("Scan = %d notes, %v", len(entries), err)
		}
		for _, e := range entries {
			if want, err := spool.Name(e.Note.Key(), e.Kind); err != nil || want != e.Name || e.Note.Validate() != nil {
				t.Fatalf("note %v under %s: %v", e.Note, e.Name, err)
			}
		}
	})
}
