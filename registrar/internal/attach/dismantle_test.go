package attach

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"testing"
	"time"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// CNI-9: once the plugin is out of the chain no DEL comes, so the mesh itself lets go
// of what its pods hold: those that are attached, and those whose ADD was lost.
func TestDismantle(t *testing.T) {
	w, m := setup(t)
	mustAdd(t, m, addRequest("c1", "a", "10.1.0.2", multiPort()))
	leaveNote(t, m.cfg.NetnsDir, &cniv1.Note{UnixNanos: time.Now().UnixNano(), What: &cniv1.Note_Attached{Attached: addRequest("c2", "b", "10.1.0.3", multiPort())}})
	leaveNote(t, m.cfg.SpoolDir, deletedNote("c3", time.Now()))
	if _, err := m.markRun(); err != nil {
		t.Fatal(err)
	}
	if err := m.Dismantle(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"uncapture c1-eth0", "unpin c1-eth0", "uncapture c2-eth0", "unpin c2-eth0"} {
		if !slices.Contains(w.events(), want) {
			t.Errorf("no %q", want)
		}
	}
	for _, path := range []string{m.cfg.SpoolDir, m.marker()} {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	if stored, err := m.store.load(); err != nil || len(stored) != 0 {
		t.Errorf("stored: %v, %v", stored, err)
	}
}
