package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/scripts/answer"
	"github.com/portolan-mesh/portolan/scripts/node"
)

const stateFolder = "/var/lib/portolan"

// smallDisk puts a small file system under the state folder, until the test ends.
// It must be called before the node is started.
func smallDisk(t *testing.T) {
	t.Helper()
	if err := unix.Mount("tmpfs", stateFolder, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0700,size=2m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(stateFolder, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// fill leaves no byte free there, and returns what frees it again.
func fill(t *testing.T) func() {
	t.Helper()
	path := filepath.Join(stateFolder, "in-the-way")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for block := make([]byte, 4096); err == nil; {
		_, err = file.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// refused adds a pod that must be refused with this code and these words.
func refused(t *testing.T, n *node.Node, spec node.PodSpec, code uint, words ...string) {
	t.Helper()
	p, err := n.AddPod(t.Context(), spec)
	if err == nil {
		t.Errorf("%s was added", spec.Name)
		if err := p.Delete(t.Context()); err != nil {
			t.Error(err)
		}
		return
	}
	got, text := node.CNIError(err)
	if got != code {
		t.Errorf("ADD: code %d (%v), want %d", got, err, code)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("ADD says %q, which lacks %q", text, word)
		}
	}
	t.Logf("ADD: %s", text)
}

// logLine waits until the program's log has a line with all these words.
func logLine(t *testing.T, p *node.Process, words ...string) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
	lines:
		for line := range strings.Lines(p.Log()) {
			for _, word := range words {
				if !strings.Contains(line, word) {
					continue lines
				}
			}
			return ""
		}
		return fmt.Sprintf("the log of %s has no line with %q; it ends with\n%s", p.Name, words, p.LogTail(20))
	})
}

// A disk that is full: an ADD is refused with the path and the remedy, a DEL
// succeeds, the running traffic notices nothing, and the programs start on it. Once
// there is space everything is stored; nothing that was known is lost, and what was
// deleted stays so (contract section 5, I10).
func TestDiskFull(t *testing.T) {
	smallDisk(t)
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	going := addPod(t, n, multiPort("payments-2"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 2)
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.Status != 200 {
		t.Fatalf("before: %s (%v)", got, err)
	}
	traffic := loadUntil(t, n, client, "http://payments.aether.internal/")
	free := fill(t)

	// What is small may still find a free page inside the file.
	large := multiPort("payments-3")
	for i := range 30 {
		large.Annotations[fmt.Sprintf("metadata.endpoint.aether.io/key-%d", i)] = strings.Repeat("x", 250)
	}
	refused(t, n, large, 11, stateFile, "no space left", "free space on the file system of "+stateFolder)
	// DEL first: what serves goes once nobody is sent there any more.
	if err := errors.Join(going.Del(t.Context()), going.Delete(t.Context())); err != nil {
		t.Errorf("DEL: %v", err)
	}
	waitHealthy(t, n, 8080, 1)
	logLine(t, n.DNS, "level=ERROR", stateFolder+"/dns.json", "no space left")
	logLine(t, n.Registrar, stateFile, "no space left", "free space")
	traffic()

	// Both start on it, with what they knew.
	for _, p := range []struct {
		process *node.Process
		start   func() error
	}{
		{n.DNS, func() error { return n.StartDNS(t.Context()) }},
		{n.Registrar, func() error { return errors.Join(n.StartRegistrar(t.Context()), n.WaitReady(t.Context())) }},
	} {
		if err := errors.Join(p.process.Kill(), p.start()); err != nil {
			t.Fatal(err)
		}
		awaitServed(t, client)
	}
	waitHealthy(t, n, 8080, 1)
	wantPods(t, n, "payments-1", "client")
	refused(t, n, large, 11, stateFile, "no space left", "free space")

	traffic = loadUntil(t, n, client, "http://payments.aether.internal/")
	free()
	addPod(t, n, large)
	waitHealthy(t, n, 8080, 2)
	logLine(t, n.DNS, "level=INFO", "table is saved again", stateFolder+"/dns.json")
	if err := errors.Join(n.Registrar.Kill(), n.StartRegistrar(t.Context()), n.WaitReady(t.Context())); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, n, 8080, 2)
	wantPods(t, n, "payments-1", "client", "payments-3")
	traffic()
}

// A state folder that is read-only: the registrar does not start and says which
// folder and what to do; Envoy and mesh DNS serve on. Once it is writable
// everything is as before (contract section 5).
func TestReadOnlyState(t *testing.T) {
	smallDisk(t)
	n := startNode(t, node.Options{})
	addPod(t, n, multiPort("payments-1"))
	client := addClient(t, n, "client")
	waitHealthy(t, n, 8080, 1)
	if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.Status != 200 {
		t.Fatalf("before: %s (%v)", got, err)
	}
	awaitTable(t, client)
	traffic := loadUntil(t, n, client, "http://payments.aether.internal/")
	if err := n.Registrar.Kill(); err != nil {
		t.Fatal(err)
	}
	remount(t, unix.MS_RDONLY)
	t.Cleanup(func() { remount(t, 0) }) // before the node removes what is there
	if err := n.Registrar.Start(); err != nil {
		t.Fatal(err)
	}
	logLine(t, n.Registrar, stateFile, "read-only file system", "make "+stateFolder+" writable")
	eventually(t, 30*time.Second, func() string {
		if n.Registrar.Running() {
			return "the registrar runs"
		}
		return ""
	})
	traffic()
	// From its last table, which was written before.
	if err := errors.Join(n.DNS.Kill(), n.StartDNS(t.Context())); err != nil {
		t.Fatal(err)
	}
	awaitServed(t, client)
	refused(t, n, multiPort("payments-2"), 11, "registrar is away", "registrar run")
	traffic = loadUntil(t, n, client, "http://payments.aether.internal/")
	remount(t, 0)
	if err := errors.Join(n.StartRegistrar(t.Context()), n.WaitReady(t.Context())); err != nil {
		t.Fatal(err)
	}
	addPod(t, n, multiPort("payments-2"))
	waitHealthy(t, n, 8080, 2)
	wantPods(t, n, "payments-1", "client", "payments-2")
	traffic()
}

// remount changes whether the state folder can be written, once nobody has a file
// of it open for writing.
func remount(t *testing.T, flags uintptr) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
		if err := unix.Mount("", stateFolder, "", unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV|flags, ""); err != nil {
			return err.Error()
		}
		return ""
	})
}

// awaitServed waits until the pod's next look-up and request are served.
func awaitServed(t *testing.T, client *node.Pod) {
	t.Helper()
	eventually(t, 30*time.Second, func() string {
		if got, err := client.Curl(t.Context(), "http://payments.aether.internal/"); err != nil || got.Status != 200 {
			return fmt.Sprintf("%s (%v)", got, err)
		}
		return ""
	})
}

// wantPods compares the pods that are attached with these.
func wantPods(t *testing.T, n *node.Node, names ...string) {
	t.Helper()
	status, err := n.RegistrarStatus(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want, got := map[string]int{}, map[string]int{}
	for _, name := range names {
		want[name]++
	}
	for _, a := range status.Attachments {
		got[a.Pod]++
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("pods attached (-want +got):\n%s", diff)
	}
}

// loadUntil sends requests over kept and new connections until the function it
// returns is called, which wants each one answered by a pod of payments.
func loadUntil(t *testing.T, n *node.Node, from *node.Pod, url string) func() {
	t.Helper()
	var finish []func()
	for name, keep := range map[string]string{"load-kept": "-keepalive=true", "load-new": "-keepalive=false"} {
		p, err := from.Start(fmt.Sprintf("%s-%d", name, len(from.Servers())), n.Binary("podserver"), "get", "-duration", "1h", "-c", "4", "-rate", "50", keep, url)
		if err != nil {
			t.Fatal(err)
		}
		finish = append(finish, func() {
			t.Helper()
			if err := p.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			var tally answer.Tally
			if err := json.Unmarshal([]byte(p.Log()), &tally); err != nil {
				t.Fatalf("%s printed %q: %v", p.Name, p.Log(), err)
			}
			wantServed(t, p.Name, tally)
			t.Logf("%s: %d requests, the slowest in %d ms", p.Name, tally.Requests, tally.MaxMillis)
		})
	}
	return func() {
		t.Helper()
		// However short the fault was, some requests are sent while it lasts.
		tally, err := from.Get(t.Context(), "-n", "100", "-c", "4", "-keepalive=false", url)
		if err != nil {
			t.Fatal(err)
		}
		wantServed(t, "at the end", tally)
		for _, f := range finish {
			f()
		}
	}
}

// wantServed reports each answer that is not a pod's of payments.
func wantServed(t *testing.T, when string, tally answer.Tally) {
	t.Helper()
	for got, count := range tally.Answers {
		if !strings.HasPrefix(got, "200 payments-") {
			t.Errorf("%s: %d of %d x %s", when, count, tally.Requests, got)
		}
	}
}
