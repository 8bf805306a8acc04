package app

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// CNI-26, CNI-64: a pod is gone when its pin is, when the runtime's path is, or when that
// leads elsewhere, however long the pin keeps the namespace. What this process cannot see
// says nothing.
func TestGone(t *testing.T) {
	pod, other := netnstest.New(t), netnstest.New(t)
	dir := t.TempDir()
	pin, file := filepath.Join(dir, "pin"), filepath.Join(dir, "file")
	write(t, pin, "")
	write(t, file, "")
	mount(t, pod.Path, pin, unix.MS_BIND)
	missing := filepath.Join(dir, "missing")
	ended := exec.CommandContext(t.Context(), "true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name         string
		pin, runtime string
		gone         bool
	}{
		{"both lead to it", pin, pod.Path, false},
		{"the pin is gone, as after a reboot", missing, pod.Path, true},
		{"both are gone", missing, missing, true},
		{"the runtime's path is gone", pin, missing, true},
		{"the runtime's path leads to another one", pin, other.Path, true},
		{"the runtime's path is what a mount left", pin, file, true},
		{"the runtime's folder cannot be seen", pin, filepath.Join(missing, "netns"), false},
		{"the runtime's process has ended", pin, fmt.Sprintf("/proc/%d/ns/net", ended.Process.Pid), true},
		{"adopted", pod.Path, pod.Path, false},
		{"adopted, by an older registrar", pod.Path, "", false},
		{"adopted, gone", missing, missing, true},
		{"adopted, what a mount left", file, file, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := (netnsCapture{}).Gone(model.Pod{Netns: tt.pin, RuntimeNetns: tt.runtime}); got != tt.gone {
				t.Errorf("gone: %v", got)
			}
		})
	}
}

// Unpin takes away what the plugin's DEL would have, pin and note, also a pin that is
// mounted twice and one that a reboot has taken already, and nothing of another pod.
func TestUnpin(t *testing.T) {
	pod, dir := netnstest.New(t), t.TempDir()
	note := func(id string) {
		key := &cniv1.Attachment{ContainerId: id, Ifname: "eth0"}
		name, err := spool.Name(key, spool.Attached)
		if err != nil {
			t.Fatal(err)
		}
		err = spool.Write(dir, name, &cniv1.Note{UnixNanos: time.Now().UnixNano(), What: &cniv1.Note_Attached{Attached: &cniv1.AddRequest{Attachment: key, Network: "net", Netns: "/x", Addresses: []string{"10.1.0.2"}}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	pinned := filepath.Join(dir, "c1-eth0")
	write(t, pinned, "")
	for range 2 {
		mount(t, pod.Path, pinned, unix.MS_BIND)
	}
	note("c1")
	note("c2") // its pin went with the reboot
	note("c3")
	for _, id := range []string{"c1", "c2", "c1"} {
		if err := (netnsCapture{netnsDir: dir}).Unpin(model.AttachmentKey{ContainerID: id, IfName: "eth0"}); err != nil {
			t.Error(err)
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != "c3-eth0.attached.json" {
		t.Errorf("left are %v, %v, want the note of c3", left, err)
	}
}
