package app

import (
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/state"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m.Run)) }

// CNI-9: what a node still has whose registrar was away when the mesh was deleted,
// uninstall takes away by itself, and not while a registrar runs.
func TestUninstallNode(t *testing.T) {
	n := newMeshedNode(t)
	n.pin(t, "c1-eth0")
	note := &cniv1.Note{UnixNanos: time.Now().UnixNano(), What: &cniv1.Note_Attached{Attached: &cniv1.AddRequest{
		Attachment: &cniv1.Attachment{ContainerId: "c1", Ifname: "eth0"}, Network: "net",
		Netns: filepath.Join(n.netns, "c1-eth0"), RuntimeNetns: n.pod.Path, Addresses: []string{"10.1.0.2"},
	}}}
	if err := spool.Write(n.netns, "c1-eth0.attached.json", note); err != nil {
		t.Fatal(err)
	}
	// Taken in while it ran, so that no note tells of it.
	adopted := netnstest.New(t)
	storePods(t, n.state, model.Pod{
		Key: model.AttachmentKey{ContainerID: "c2", IfName: "eth0"}, Netns: adopted.Path, RuntimeNetns: adopted.Path,
		Addresses: []netip.Addr{netip.MustParseAddr("10.1.0.3")},
	})
	settings := netnsCapture{vipRanges: []netip.Prefix{netip.MustParsePrefix(defaultVIP4)}}.settings(model.Pod{}, nil)
	for _, pod := range []*netnstest.Namespace{n.pod, adopted} {
		if err := capture.Apply(pod.Path, settings); err != nil {
			t.Fatal(err)
		}
	}
	n.pin(t, "stray-eth0") // an ADD that was killed between two steps left it
	n.copyMounts(t)
	for _, path := range []string{
		filepath.Join(n.spool, "c3-eth0.deleted.json.unreadable"), filepath.Join(n.run, "registrar.started"),
		filepath.Join(n.state, caFolder, "svids", "key.pem"),
	} {
		write(t, path, "x")
	}

	running := n.open(t)
	says(t, 1, "another registrar holds it", n.uninstall...)
	if text, err := os.ReadFile(n.list); err != nil || !strings.Contains(string(text), "portolan") {
		t.Errorf("refused, and the list is %s, %v", text, err)
	}
	if err := running.Close(); err != nil {
		t.Fatal(err)
	}

	says(t, 0, "go on without the mesh", n.uninstall...)
	if text, err := os.ReadFile(n.list); err != nil || string(text) != primaryList {
		t.Errorf("the list is %s, %v", text, err)
	}
	for _, pod := range []*netnstest.Namespace{n.pod, adopted} {
		if _, missing := errors.AsType[*capture.MissingError](capture.Verify(pod.Path, settings)); !missing {
			t.Errorf("%s still has a capture", pod.Path)
		}
	}
	for _, path := range []string{n.netns, n.spool, filepath.Join(n.run, "registrar.started"), filepath.Join(n.state, caFolder)} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), n.netns) {
		t.Errorf("mounts are left: %s, %v", mounts, err)
	}
	if pods := attachedPods(t, n.state); len(pods) != 0 {
		t.Errorf("still attached: %v", pods)
	}
	says(t, 0, "no network configuration has the plugin", n.uninstall...)
}

// The CA of a machine of its own, which others may trust, outlives the mesh with what was
// set aside of it, and goes when that is said; certificates and keys go at once.
func TestUninstallKeepsTheCA(t *testing.T) {
	n := newMeshedNode(t)
	ca := filepath.Join(n.state, caFolder)
	if _, err := identity.OpenCA(ca, "aether.internal", time.Now, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	files := func() string {
		var names []string
		entries, _ := os.ReadDir(ca)
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return strings.Join(names, " ")
	}
	made := files()
	if made == "" {
		t.Fatal("the CA has no file")
	}
	root, err := os.ReadFile(filepath.Join(ca, made))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(ca, made+".corrupt-20260101T000000Z"), "x")
	write(t, filepath.Join(ca, "svids", "key.pem"), "x")
	write(t, filepath.Join(ca, "roots.pem"), "x")
	says(t, 0, "the built-in CA is kept", n.uninstall...)
	if got, want := files(), made+" "+made+".corrupt-20260101T000000Z"; got != want {
		t.Errorf("left are %s, want %s", got, want)
	}
	if again, err := os.ReadFile(filepath.Join(ca, made)); err != nil || !bytes.Equal(again, root) {
		t.Errorf("the CA is another one: %v", err)
	}
	says(t, 0, ca+": removed", append(n.uninstall, "--remove-ca")...)
	if _, err := os.Lstat(ca); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the CA is left: %s, %v", files(), err)
	}
	says(t, 0, "go on without the mesh", append(n.uninstall, "--remove-ca")...)
}

// meshedNode is what the mesh has on a node, in folders of a test.
type meshedNode struct {
	run, netns, spool, state, list string
	// pod is one that is pinned.
	pod *netnstest.Namespace
	// uninstall is the command line.
	uninstall []string
}

func newMeshedNode(t *testing.T) *meshedNode {
	t.Helper()
	dir := t.TempDir()
	n := &meshedNode{
		run: filepath.Join(dir, "run"), netns: filepath.Join(dir, "run", "netns"), spool: filepath.Join(dir, "run", "spool"),
		state: filepath.Join(dir, "state"), list: filepath.Join(dir, "net.d", "10-net.conflist"), pod: netnstest.New(t),
	}
	n.uninstall = []string{
		"uninstall", "--cni-conf-dir", filepath.Dir(n.list), "--cni-socket", filepath.Join(dir, "cni.sock"),
		"--netns-dir", n.netns, "--spool-dir", n.spool, "--state-dir", n.state,
	}
	write(t, n.list, strings.Replace(primaryList, `{"type": "bridge"}`, `{"type": "bridge"},`+"\n"+`    {"type":"portolan"}`, 1))
	if err := os.MkdirAll(n.netns, 0o750); err != nil {
		t.Fatal(err)
	}
	// As on a node: the folder of the run is in a shared mount, and the plugin makes the
	// folder of pins one of its own. Each pin is then in both.
	for _, dir := range []string{n.run, n.netns} {
		mount(t, dir, dir, unix.MS_BIND)
		mount(t, "", dir, unix.MS_SHARED)
	}
	return n
}

// mount mounts until the test ends.
func mount(t *testing.T, source, target string, flags uintptr) {
	t.Helper()
	if err := unix.Mount(source, target, "", flags, ""); err != nil {
		t.Fatalf("mount %s: %v", target, err)
	}
	t.Cleanup(func() {
		for unix.Unmount(target, unix.MNT_DETACH) == nil {
			continue
		}
	})
}

// pin pins the pod under a name, as the plugin does.
func (n *meshedNode) pin(t *testing.T, name string) {
	t.Helper()
	path := filepath.Join(n.netns, name)
	write(t, path, "")
	mount(t, n.pod.Path, path, unix.MS_BIND)
}

// copyMounts makes what a container has that is given the runtime's folder: a private
// copy of the folder of the run.
func (n *meshedNode) copyMounts(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	mount(t, dir, dir, unix.MS_BIND)
	mount(t, "", dir, unix.MS_PRIVATE)
	mount(t, n.run, dir, unix.MS_BIND|unix.MS_REC)
	mount(t, "", dir, unix.MS_PRIVATE|unix.MS_REC)
}

// open opens the state, which its registrar holds while it runs.
func (n *meshedNode) open(t *testing.T) *bolt.DB {
	t.Helper()
	return openState(t, n.state)
}

// openState opens the state in a folder.
func openState(t *testing.T, dir string) *bolt.DB {
	t.Helper()
	db, _, err := state.Open(filepath.Join(dir, stateFile), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() }) // a second time where the test closed it
	return db
}

// storePods stores attached pods as attach does.
func storePods(t *testing.T, dir string, pods ...model.Pod) {
	t.Helper()
	db := openState(t, dir)
	records, err := state.OpenRecords[model.Pod](db, "attachments", slog.New(slog.DiscardHandler))
	if err == nil {
		all := map[string]model.Pod{}
		for _, p := range pods {
			all[p.Key.ContainerID+"/"+p.Key.IfName] = p
		}
		err = records.Save(all)
	}
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	if len(attachedPods(t, dir)) != len(pods) {
		t.Fatal("the pods are not stored as attach stores them")
	}
}

// attachedPods are the pods that a registrar would find.
func attachedPods(t *testing.T, dir string) []model.Pod {
	t.Helper()
	db := openState(t, dir)
	pods, err := attach.New(attach.Config{DB: db, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	return pods.Pods()
}
