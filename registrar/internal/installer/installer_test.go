package installer

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

const calico = `{"name":"k8s-pod-network","cniVersion":"0.4.0","type":"calico","ipam":{"type":"calico-ipam"}}`

// CNI-1: a primary writes its file again without our entry, in place and by a rename;
// the entry comes back once, and nothing else of the file differs.
func TestOverwrittenByPrimary(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	i, _ := n.run(nil)
	n.await("flannel,portmap,portolan")
	changed := strings.Replace(flannel, "hairpinMode\": true", "hairpinMode\": false", 1)
	n.put("10-flannel.conflist", changed)
	eventually(t, "the entry after a write in place", func() bool { return n.metric(i, "reinsertions_total") == 1 })
	n.await("flannel,portmap,portolan")
	if got, err := Remove([]byte(n.read("10-flannel.conflist"))); err != nil || string(got) != changed {
		t.Errorf("the primary's part is %s, %v", got, err)
	}
	n.putAtomically("10-flannel.conflist", flannel)
	eventually(t, "the entry after a rename", func() bool { return n.metric(i, "reinsertions_total") == 2 })
	n.await("flannel,portmap,portolan")
	if got, err := Remove([]byte(n.read("10-flannel.conflist"))); err != nil || string(got) != flannel {
		t.Errorf("the primary's part is %s, %v", got, err)
	}
	eventually(t, "the gauge", func() bool { return n.metric(i, "chained") == 1 })
	if got := n.names(); !slices.Equal(got, []string{"10-flannel.conflist"}) {
		t.Errorf("files %v", got)
	}
	if s := i.State(); !s.Chained || s.Problem != "" || s.File != filepath.Join(n.conf, "10-flannel.conflist") {
		t.Errorf("state %+v", s)
	}
}

// CNI-7: a primary puts others' files aside and brings its own: the entry goes where
// the runtime looks, and the file that nobody reads stays as it was put aside.
func TestFollowsRename(t *testing.T) {
	n := newTestNode(t)
	n.put("05-x.conflist", strings.Replace(flannel, "cbr0", "x", 1))
	n.run(nil)
	n.await("flannel,portmap,portolan")
	aside := n.read("05-x.conflist")
	n.rename("05-x.conflist", "05-x.conflist.cilium_bak")
	n.put("05-cilium.conflist", `{"cniVersion":"0.3.1","name":"cilium","plugins":[{"type":"cilium-cni"}]}`)
	n.await("cilium-cni,portolan")
	if got := n.read("05-x.conflist.cilium_bak"); got != aside {
		t.Errorf("the file that was put aside was changed to %s", got)
	}
	if got := n.names(); !slices.Equal(got, []string{"05-cilium.conflist"}) {
		t.Errorf("files %v", got)
	}
}

// CNI-8: a single configuration is left alone and an owned list is put before it,
// which follows its changes; uninstalling removes the list only.
func TestSingleConfiguration(t *testing.T) {
	n := newTestNode(t)
	n.put("10-x.conf", calico)
	i, stop := n.run(nil)
	n.await("calico,portolan")
	if n.read("10-x.conf") != calico || !slices.Equal(n.names(), []string{"02-own.conflist", "10-x.conf"}) {
		t.Errorf("files %v, foreign one %s", n.names(), n.read("10-x.conf"))
	}
	n.put("10-x.conf", strings.Replace(calico, "calico-ipam", "host-local", 1))
	eventually(t, "the change of the source", func() bool { return strings.Contains(n.read("02-own.conflist"), "host-local") })
	if got := n.metric(i, "reinsertions_total"); got != 0 {
		t.Errorf("%d re-insertions, although the entry was never gone", got)
	}
	stop()
	changes, err := Uninstall(t.Context(), n.conf)
	if err != nil || len(changes) != 1 || n.types() != "calico" || !slices.Equal(n.names(), []string{"10-x.conf"}) {
		t.Errorf("uninstalled %v, %v: %v, chain %s", changes, err, n.names(), n.types())
	}
}

// An owned list sorts before the file that it stands for, whatever that is called,
// and the older one goes; where no name would do the state says so.
func TestOwnedListIsFirst(t *testing.T) {
	n := newTestNode(t)
	n.put("10-x.conf", calico)
	i := n.installer(nil)
	i.Install(t.Context())
	n.put("01-multi.conf", strings.Replace(calico, `"calico"`, `"multi"`, 1))
	i.Install(t.Context())
	if got, want := n.names(), []string{"00-02-own.conflist", "01-multi.conf", "10-x.conf"}; !slices.Equal(got, want) || n.types() != "multi,portolan" {
		t.Errorf("files %v, chain %s", got, n.types())
	}
	n.put("!.conf", calico)
	if s := i.Install(t.Context()); s.Chained || !strings.Contains(s.Problem, "!.conf would be loaded before our list 02-own.conflist") {
		t.Errorf("state %+v", s)
	}
}

// A list that is a symbolic link is not replaced by a file; an owned list stands for it.
func TestSymbolicLink(t *testing.T) {
	n := newTestNode(t)
	target := filepath.Join(t.TempDir(), "real.conflist")
	put(t, filepath.Dir(target), filepath.Base(target), flannel)
	if err := os.Symlink(target, filepath.Join(n.conf, "10-flannel.conflist")); err != nil {
		t.Fatal(err)
	}
	n.installer(nil).Install(t.Context())
	text, err := os.ReadFile(target)
	info, errL := os.Lstat(filepath.Join(n.conf, "10-flannel.conflist"))
	if err != nil || errL != nil || string(text) != flannel || info.Mode().Type() != fs.ModeSymlink {
		t.Errorf("the link or its file was changed: %v, %v", err, errL)
	}
	if n.types() != "flannel,portmap,portolan" {
		t.Errorf("chain %s", n.types())
	}
}

// CNI-10: of two instances the later one owns. The earlier one's end, however certain
// the removal, leaves everything, and so do its looks. The owner's own end cleans up.
func TestTwoInstances(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	gone := func(c *Config) { c.Removal = removal{removed: true} }
	a, stopA := n.run(gone)
	n.await("flannel,portmap,portolan")
	b, stopB := n.run(func(c *Config) {
		gone(c)
		c.Instance, c.Entry = "b", Entry{Socket: "/new.sock"}
	})
	eventually(t, "the entry of the later instance", func() bool { return strings.Contains(n.read("10-flannel.conflist"), "/new.sock") })
	eventually(t, "its count", func() bool { return n.metric(b, "conf_writes_total") == 1 })
	before := n.read("10-flannel.conflist")
	n.put("99-x.conflist", flannel) // both look
	stopA()
	if got := n.read("10-flannel.conflist"); got != before || !a.State().Chained {
		t.Errorf("the earlier instance left %s, state %+v", got, a.State())
	}
	if wa, wb := n.metric(a, "conf_writes_total"), n.metric(b, "conf_writes_total"); wa != 1 || wb != 1 {
		t.Errorf("the instances wrote against each other: %d and %d writes", wa, wb)
	}
	stopB()
	if got := n.read("10-flannel.conflist"); got != flannel {
		t.Errorf("the later instance left %s", got)
	}
	if _, err := os.Stat(filepath.Join(n.conf, markerName)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the marker is left: %v", err)
	}
}

// An instance that was replaced takes over when the entry stays away longer than a
// living owner would let it, and not before.
func TestTakeover(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	a := n.installer(nil)
	a.Install(t.Context())
	n.installer(func(c *Config) { c.Instance = "b" }).Install(t.Context())
	n.put("10-flannel.conflist", flannel)
	for range 2 {
		if s := a.Install(t.Context()); s.Chained {
			t.Fatalf("the replaced instance wrote: %+v", s)
		}
		n.advance(takeover - time.Second)
	}
	n.advance(time.Second)
	if s := a.Install(t.Context()); !s.Chained {
		t.Errorf("not taken over: %+v", s)
	}
}

// CNI-11: a runtime that reads all the time sees whole files only, and never none,
// while they are replaced 10,000 times.
func TestReaderSeesWholeFiles(t *testing.T) {
	if info, err := os.Stat("/dev/shm"); err == nil && info.IsDir() {
		t.Setenv("TMPDIR", "/dev/shm") // 20,000 waits for a disk take minutes
	}
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	path := filepath.Join(n.conf, "10-flannel.conflist")
	stop, read := make(chan struct{}), make(chan int)
	go func() {
		loads := 0
		defer func() { read <- loads }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			paths, err := libcni.ConfFiles(n.conf, confExtensions())
			if err != nil || len(paths) != 1 {
				t.Errorf("files %v: %v", paths, err)
				return
			}
			if l, err := libcni.ConfListFromFile(paths[0]); err != nil || len(l.Plugins) < 2 {
				t.Errorf("read a part: %v", err)
				return
			}
			loads++
		}
	}()
	old, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for range 5000 {
		for _, edit := range []func([]byte) ([]byte, error){
			func(text []byte) ([]byte, error) { return Insert(text, []byte(entryText)) }, Remove,
		} {
			text, err := edit(old)
			if err == nil {
				err = replaceConf(path, old, text)
			}
			if err != nil {
				t.Fatal(err)
			}
			old = text
		}
	}
	close(stop)
	if loads := <-read; loads == 0 {
		t.Error("nothing was read meanwhile")
	} else {
		t.Logf("%d loads during 10,000 writes", loads)
	}
}

// CNI-13: the plugin's binary is unlinked, or its mode or content changed by others;
// it is restored, and other binaries are not touched.
func TestBinaryIsRestored(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	i, _ := n.run(nil)
	n.await("flannel,portmap,portolan")
	target, source := filepath.Join(n.cfg.BinDir, "portolan"), read(t, n.cfg.Source)
	put(t, n.cfg.BinDir, "loopback", "other")
	for copies, damage := range []func() error{
		func() error { return os.Remove(target) },
		func() error { return os.Chmod(target, 0o600) },
		func() error { return os.WriteFile(target, []byte(strings.ToUpper(source)), 0o600) },
		func() error { return os.WriteFile(target, nil, 0o600) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the restored binary", func() bool { return n.metric(i, "binary_copies_total") == copies+2 })
		info, err := os.Stat(target)
		if err != nil || info.Mode() != 0o755 || read(t, target) != source {
			t.Errorf("after damage %d: %v, %v", copies, info, err)
		}
	}
	names, err := filepath.Glob(filepath.Join(n.cfg.BinDir, "*"))
	if err != nil || len(names) != 2 || read(t, filepath.Join(n.cfg.BinDir, "loopback")) != "other" {
		t.Errorf("binaries %v, %v", names, err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// CNI-14: without a watch the folders are polled; it is counted and said, and it is no
// reason not to be ready. The watch is tried again later.
func TestWatchFails(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	broken := make(chan bool, 1)
	broken <- true
	i, _ := n.run(func(c *Config) {
		c.Poll = 20 * time.Millisecond
		c.NewWatcher = func() (*fsnotify.Watcher, error) {
			b := <-broken
			broken <- b
			if b {
				return nil, unix.EMFILE
			}
			return fsnotify.NewWatcher()
		}
	})
	n.await("flannel,portmap,portolan")
	n.put("10-flannel.conflist", flannel)
	eventually(t, "the repair by polling", func() bool { return n.metric(i, "reinsertions_total") == 1 })
	if got := n.metric(i, "watch_errors_total"); got != 1 {
		t.Errorf("%d errors of the watch, want 1", got)
	}
	if s := i.State(); !s.Chained || s.Watch != unix.EMFILE.Error() {
		t.Errorf("state %+v", s)
	}
	<-broken
	broken <- false
	n.advance(rewatchAfter)
	eventually(t, "the watch", func() bool { return i.State().Watch == "" })
}

// A folder that is taken away is made again, and watched again (CNI-15).
func TestFolderIsMadeAgain(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	i, _ := n.run(nil)
	n.await("flannel,portmap,portolan")
	if err := os.Rename(n.conf, n.conf+".aside"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the folder", func() bool { return n.read(markerName) != "" })
	n.put("10-flannel.conflist", flannel)
	n.await("flannel,portmap,portolan")
	n.put("10-flannel.conflist", flannel)
	n.await("flannel,portmap,portolan")
	eventually(t, "the state", func() bool { return i.State().Chained })
}

// CNI-16: an empty file that the runtime would load first is not edited and not
// hidden; it is named, and the chain counts as missing, although the next file has it.
func TestBrokenForeignFile(t *testing.T) {
	n := newTestNode(t)
	n.put("00-bad.conf", "")
	n.put("10-ok.conflist", flannel)
	i := n.installer(nil)
	s := i.Install(t.Context())
	if s.Chained || n.metric(i, "chained") != 0 || !strings.Contains(s.Problem, filepath.Join(n.conf, "00-bad.conf")+": it is empty") {
		t.Errorf("state %+v", s)
	}
	if !strings.Contains(n.logs.String(), "00-bad.conf") {
		t.Error("the log does not name the file")
	}
	if n.read("00-bad.conf") != "" || !slices.Equal(n.names(), []string{"00-bad.conf", "10-ok.conflist"}) {
		t.Errorf("files %v", n.names())
	}
	n.remove("00-bad.conf")
	if s := i.Install(t.Context()); !s.Chained || s.Problem != "" || n.types() != "flannel,portmap,portolan" {
		t.Errorf("state %+v, chain %s", s, n.types())
	}
}

// What we cannot be chained to is left as it is, and the state says why.
func TestUnusableFiles(t *testing.T) {
	tests := []struct{ name, file, text, want string }{
		{"half written", "10-x.conflist", flannel[:100], "unexpected end of JSON input"},
		{"no name", "10-x.conf", `{"cniVersion":"1.0.0","type":"bridge"}`, "no name"},
		{"no type", "10-x.conf", `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge"}]}`, "missing 'type'"},
		{"too old a version", "10-x.conflist", `{"cniVersion":"0.2.0","name":"n","plugins":[{"type":"a"}]}`, `cniVersion "0.2.0"`},
		{"no version", "10-x.conflist", `{"name":"n","plugins":[{"type":"a"}]}`, `cniVersion ""`},
		{"a version to come", "10-x.conf", `{"cniVersion":"9.9.9","name":"n","type":"a"}`, `cniVersion "9.9.9"`},
		{"only us", "10-x.conflist", `{"cniVersion":"1.0.0","name":"n","plugins":[` + entryText + `]}`, "no plugin but ours"},
		{"only us in a single file", "10-x.conf", `{"cniVersion":"1.0.0","name":"n","type":"portolan"}`, "no plugin but ours"},
		{"no inline plugins", "10-x.conflist", `{"cniVersion":"1.1.0","name":"n"}`, "no plugins of its own"},
		{"nothing but the loopback", "99-loopback.conf", `{"cniVersion":"1.0.0","name":"lo","type":"loopback"}`, "install the primary CNI plugin"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := newTestNode(t)
			n.put(tt.file, tt.text)
			s := n.installer(nil).Install(t.Context())
			if s.Chained || !strings.Contains(s.Problem, tt.want) {
				t.Errorf("state %+v, want a problem with %q", s, tt.want)
			}
			if n.read(tt.file) != tt.text || len(n.names()) != 1 {
				t.Errorf("files %v, the foreign one %s", n.names(), n.read(tt.file))
			}
		})
	}
	n := newTestNode(t)
	n.put("10-x.conflist", `{"cniVersions":["0.4.0","1.1.0"],"name":"n","plugins":[{"type":"a"}]}`)
	if s := n.installer(nil).Install(t.Context()); !s.Chained {
		t.Errorf("a list with cniVersions only: %+v", s)
	}
}

// Without a plugin to copy no entry is written, and an entry that is there stays:
// pods must wait rather than start unmeshed.
func TestNoBinaryNoEntry(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	n.put("../portolan.source", "")
	i := n.installer(nil)
	if s := i.Install(t.Context()); s.Chained || !strings.Contains(s.Problem, "portolan.source is no program") || n.read("10-flannel.conflist") != flannel {
		t.Errorf("state %+v, file %s", s, n.read("10-flannel.conflist"))
	}
	n.put("../portolan.source", "x")
	i.Install(t.Context())
	chained := n.read("10-flannel.conflist")
	n.put("../portolan.source", "")
	if s := i.Install(t.Context()); !s.Chained || s.Problem == "" || n.read("10-flannel.conflist") != chained || n.metric(i, "install_errors_total") != 2 {
		t.Errorf("state %+v, file %s", s, n.read("10-flannel.conflist"))
	}
}

// The binary is there before the first entry, and the temporary files that a killed
// installer left are gone.
func TestOrder(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	put(t, n.conf, ".portolan-123.tmp", "left")
	w, err := fsnotify.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := errors.Join(os.MkdirAll(n.cfg.BinDir, 0o750), w.Add(n.cfg.BinDir), w.Add(n.conf)); err != nil {
		t.Fatal(err)
	}
	n.installer(nil).Install(t.Context())
	var created []string
	for len(created) < 2 {
		if e := next(t, w); e.Has(fsnotify.Create) && (filepath.Base(e.Name) == "portolan" || isConf(e.Name)) {
			created = append(created, filepath.Base(e.Name))
		}
	}
	if !slices.Equal(created, []string{"portolan", "10-flannel.conflist"}) {
		t.Errorf("order %v", created)
	}
	left, err := filepath.Glob(filepath.Join(n.conf, ".portolan-*.tmp"))
	if err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func next(t *testing.T, w *fsnotify.Watcher) fsnotify.Event {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case e := <-w.Events:
		return e
	case <-timer.C:
		t.Fatal("no event came")
		return fsnotify.Event{}
	}
}

// CNI-15: containerd reloads on events other than Create and Chmod. A write of ours is
// a rename within the folder, whose first half makes it reload when the second has
// happened: what it then reads has our entry.
func TestContainerdReloads(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	w, err := fsnotify.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.Add(n.conf); err != nil {
		t.Fatal(err)
	}
	n.installer(nil).Install(t.Context())
	final := filepath.Join(n.conf, "10-flannel.conflist")
	loaded := ""
	var before fsnotify.Event
	for {
		e := next(t, w)
		if !e.Has(fsnotify.Create) && !e.Has(fsnotify.Chmod) {
			loaded = n.types()
		}
		if e.Name == final {
			if !e.Has(fsnotify.Create) || !before.Has(fsnotify.Rename) || filepath.Dir(before.Name) != n.conf || isConf(before.Name) {
				t.Errorf("%v after %v, want Create after Rename of a temporary file", e, before)
			}
			break
		}
		before = e
	}
	if loaded != "flannel,portmap,portolan" {
		t.Errorf("containerd would use %s", loaded)
	}
	select {
	case e := <-w.Events:
		if e.Name == final {
			t.Errorf("%v after the install", e)
		}
	default:
	}
}

// removal answers as it is told.
type removal struct {
	removed bool
	err     error
}

// Removed implements Removal.
func (r removal) Removed(context.Context) (bool, error) { return r.removed, r.err }

// CNI-3: at the end everything stays unless the removal is certain.
func TestEnd(t *testing.T) {
	tests := []struct {
		name    string
		removal Removal
		cleaned bool
	}{
		{"nobody to ask", nil, false},
		{"not removed", removal{}, false},
		{"not known", removal{err: context.DeadlineExceeded}, false},
		{"not known after all", removal{removed: true, err: context.DeadlineExceeded}, false},
		{"removed", removal{removed: true}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := newTestNode(t)
			n.put("10-flannel.conflist", flannel)
			i, stop := n.run(func(c *Config) { c.Removal = tt.removal })
			n.await("flannel,portmap,portolan")
			eventually(t, "the gauge", func() bool { return n.metric(i, "chained") == 1 })
			stop()
			if got := n.types() == "flannel,portmap"; got != tt.cleaned {
				t.Errorf("chain %s at the end", n.types())
			}
			if got := n.metric(i, "chained") == 0; got != tt.cleaned {
				t.Errorf("the gauge says cleaned %v", got)
			}
			if got := i.State().Removed; got != tt.cleaned {
				t.Errorf("the state says removed %v", got)
			}
			if _, err := os.Stat(filepath.Join(n.cfg.BinDir, "portolan")); err != nil {
				t.Errorf("the binary must stay for DEL: %v", err)
			}
		})
	}
}

// A link to nothing is what the runtime stumbles over, not a file that has just gone. Its
// target may come at any time, of which no notice tells.
func TestLinkToNothing(t *testing.T) {
	n := newTestNode(t)
	target := filepath.Join(t.TempDir(), "real.conflist")
	if err := os.Symlink(target, filepath.Join(n.conf, "05-gone.conflist")); err != nil {
		t.Fatal(err)
	}
	n.put("10-flannel.conflist", flannel)
	i := n.installer(nil)
	s := i.Install(t.Context())
	if _, err := load(n.conf); err == nil || s.Chained || !strings.Contains(s.Problem, "05-gone.conflist: it is a symbolic link to nothing") {
		t.Errorf("the runtime says %v, state %+v", err, s)
	}
	put(t, filepath.Dir(target), filepath.Base(target), flannel)
	if s := i.Install(t.Context()); !s.Chained || s.Problem != "" || n.types() != "flannel,portmap,portolan" {
		t.Errorf("state %+v, chain %s", s, n.types())
	}
}

// Where the installer cannot write, it says so, and what the runtime loads is said as it
// is: a node that is in the mesh stays Ready for it.
func TestNothingCanBeWritten(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	n.installer(nil).Install(t.Context())
	n.remove(markerName)
	if err := os.Mkdir(filepath.Join(n.conf, markerName), 0o750); err != nil { // no marker, no write
		t.Fatal(err)
	}
	i := n.installer(nil)
	file := filepath.Join(n.conf, "10-flannel.conflist")
	if s := i.Install(t.Context()); !s.Chained || s.File != file || !strings.Contains(s.Problem, markerName) || n.metric(i, "chained") != 1 {
		t.Errorf("state %+v", s)
	}
	n.put("10-flannel.conflist", flannel)
	if s := i.Install(t.Context()); s.Chained || s.File != file || !strings.Contains(s.Problem, markerName) {
		t.Errorf("state without the entry %+v", s)
	}
}
