package listen_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/registrar/internal/listen"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// A table goes on after its namespace's path is gone, and shows that the last
// socket closed: the registrar sees a pod die whose DEL has not come.
func TestPathRemoved(t *testing.T) {
	pod := newPod(t)
	table := openTable(t, pod.Path)
	l := listenAt(t, pod, "127.0.0.1:9090", listenOptions{})
	pod.Unmount(t)
	if s := read(t, table); !s.Listens(9090) {
		t.Error("not readable after the path is gone")
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if s := read(t, table); s.Len() != 0 {
		t.Error("a closed listener is still there")
	}
}

// An open table keeps its namespace alive, a closed one does not: the veth peer
// outside goes with the namespace, and with nothing else.
func TestCloseFreesNamespace(t *testing.T) {
	pod, outside := netnstest.New(t), netnstest.New(t)
	netnstest.Connect(t, "eth0", netnstest.End{In: pod}, netnstest.End{In: outside})
	table := openTable(t, pod.Path)
	gone := make(chan struct{})
	updates, stop := make(chan netlink.LinkUpdate, 16), make(chan struct{})
	defer close(stop)
	outside.Do(t, func() error { return netlink.LinkSubscribe(updates, stop) })
	go func() {
		defer close(gone)
		for u := range updates {
			if u.Header.Type == unix.RTM_DELLINK && u.Attrs().Name == "eth0" {
				return
			}
		}
	}()
	pod.Unmount(t)
	read(t, table)
	outside.Do(t, func() error {
		_, err := netlink.LinkByName("eth0")
		return err // the namespace went although its table is open
	})
	if err := table.Close(); err != nil {
		t.Fatal(err)
	}
	timeout := time.NewTimer(30 * time.Second)
	defer timeout.Stop()
	select {
	case <-gone:
	case <-timeout.C:
		t.Error("the namespace is still there after Close")
	}
}

// A closed table says so, and closing it again does no harm.
func TestClosed(t *testing.T) {
	table := openTable(t, newPod(t).Path)
	if err := table.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := table.Read(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read: %v", err)
	}
	if _, err := table.Lookup([]uint16{1}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Lookup: %v", err)
	}
	if err := table.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Close: %v", err)
	}
}

// Closing while others read races with nothing and never reads a foreign fd.
func TestCloseWhileReading(t *testing.T) {
	table := openTable(t, newPod(t).Path)
	var wg sync.WaitGroup
	started := make(chan struct{}, 4)
	for range 4 {
		wg.Go(func() {
			for first := true; ; first = false {
				_, err := table.Read()
				if first {
					started <- struct{}{}
				}
				if errors.Is(err, os.ErrClosed) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 4 {
		<-started
	}
	if err := table.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
}

// A thousand tables leave no file descriptor and no thread in another namespace.
func TestOpenLeavesNothing(t *testing.T) {
	pod := newPod(t)
	openTable(t, pod.Path) // whatever the runtime opens once is open now
	fds, strayed := openFiles(t), strayedThreads(t)
	for range 1000 {
		table, err := listen.Open(pod.Path)
		if err != nil {
			t.Fatal(err)
		}
		if err := table.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got := openFiles(t); got != fds {
		t.Errorf("%d open files, %d before", got, fds)
	}
	for thread, where := range strayedThreads(t) {
		if strayed[thread] != where {
			t.Errorf("%s is %s", thread, where)
		}
	}
}

// strayedThreads returns the threads that are in another network namespace than
// the calling one, with the namespace. The tests' own helpers may leave some.
func strayedThreads(tb testing.TB) map[string]string {
	tb.Helper()
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		tb.Fatal(err)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		tb.Fatal(err)
	}
	out := map[string]string{}
	for _, task := range tasks {
		if got, err := os.Readlink(task); err == nil && got != own {
			out[task] = got
		}
	}
	return out
}

func openFiles(tb testing.TB) int {
	tb.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(list)
}

// A path that is no network namespace is refused by name, and leaves nothing open.
func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fds := openFiles(t)
	for name, path := range map[string]string{
		"missing":          filepath.Join(dir, "missing"),
		"a pin unmounted":  file,
		"a folder":         dir,
		"another kind":     "/proc/self/ns/uts",
		"empty":            "",
		"a file of procfs": "/proc/self/status",
	} {
		t.Run(name, func(t *testing.T) {
			table, err := listen.Open(path)
			if err == nil {
				_ = table.Close()
				t.Fatal("opened")
			}
			if !strings.Contains(err.Error(), "network namespace "+path) {
				t.Errorf("error %q does not name the path", err)
			}
		})
	}
	if got := openFiles(t); got != fds {
		t.Errorf("%d open files, %d before", got, fds)
	}
}
