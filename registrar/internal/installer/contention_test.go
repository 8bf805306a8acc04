package installer

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// A primary that writes its file back every second for ten minutes, each way that
// primaries do: our entry is there all the time but for the first repairs, and few
// writes are made (CNI-1, CNI-2).
func TestPrimaryRewritesEverySecond(t *testing.T) {
	tests := []struct {
		name string
		// write is the primary's write in second k.
		write func(n *testNode, k int)
		most  int
	}{
		{"in place", func(n *testNode, _ int) { n.put("10-flannel.conflist", flannel) }, freeStrikes + 1},
		{"by a rename", func(n *testNode, _ int) { n.putAtomically("10-flannel.conflist", flannel) }, freeStrikes + 1},
		{"something new each time", func(n *testNode, k int) {
			n.put("10-flannel.conflist", strings.Replace(flannel, "cbr0", fmt.Sprintf("cbr%d", k), 1))
		}, 28},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := newTestNode(t)
			n.put("10-flannel.conflist", flannel)
			i := n.installer(nil)
			i.Install(t.Context())
			missing := 0
			for k := range 600 {
				tt.write(n, k)
				if n.types() != "flannel,portmap,portolan" {
					missing++
				}
				i.Install(t.Context())
				if n.types() != "flannel,portmap,portolan" {
					t.Fatalf("second %d: chain %s", k, n.types())
				}
				n.advance(time.Second)
			}
			if missing > freeStrikes {
				t.Errorf("the entry was gone %d times", missing)
			}
			writes := n.metric(i, "conf_writes_total")
			if writes > tt.most {
				t.Errorf("%d writes, want at most %d", writes, tt.most)
			}
			t.Logf("600 writes of the primary: %d of ours, %d re-insertions", writes, n.metric(i, "reinsertions_total"))
		})
	}
}

// A primary that removes its file and makes it again is met with patience as well.
func TestPrimaryRemovesItsFile(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	i := n.installer(nil)
	i.Install(t.Context())
	for k := range 600 {
		n.remove("10-flannel.conflist")
		i.Install(t.Context())
		if k > freeStrikes && n.types() != "flannel,portmap,portolan" {
			t.Fatalf("second %d: chain %s while the primary is without its file", k, n.types())
		}
		n.put("10-flannel.conflist", flannel)
		i.Install(t.Context())
		if n.types() != "flannel,portmap,portolan" {
			t.Fatalf("second %d: chain %s", k, n.types())
		}
		n.advance(time.Second)
	}
	if writes := n.metric(i, "conf_writes_total"); writes > freeStrikes+1 {
		t.Errorf("%d writes", writes)
	}
}

// A primary that allows no file but its own, and writes that every second: the entry
// goes back into its file, ever more slowly, and the state says who is to be told.
func TestExclusivePrimary(t *testing.T) {
	n := newTestNode(t)
	n.put("05-cilium.conflist", flannel)
	i := n.installer(nil)
	i.Install(t.Context())
	var s State
	for range 600 {
		for _, name := range n.names() {
			if name != "05-cilium.conflist" {
				n.rename(name, name+".cilium_bak")
			}
		}
		n.put("05-cilium.conflist", flannel)
		s = i.Install(t.Context())
		n.advance(time.Second)
	}
	if writes := n.metric(i, "conf_writes_total"); writes > 30 {
		t.Errorf("%d writes", writes)
	} else {
		t.Logf("600 writes of the primary: %d of ours", writes)
	}
	if !strings.Contains(s.Problem, "05-cilium.conflist is changed by somebody else again and again") && !s.Chained {
		t.Errorf("state %+v", s)
	}
	if got := n.names(); !slices.Equal(got, []string{"05-cilium.conflist"}) {
		t.Errorf("files %v", got)
	}
	// It stops: the next repair holds.
	n.advance(maxDelay)
	if s := i.Install(t.Context()); !s.Chained {
		t.Errorf("state %+v", s)
	}
}

// After a calm minute a repair is immediate again, and an owned list that was made in
// the fight stays: it is there, and it works.
func TestCalm(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	i := n.installer(nil)
	for range freeStrikes + 2 {
		i.Install(t.Context())
		n.put("10-flannel.conflist", flannel)
	}
	if n.types() != "flannel,portmap,portolan" || len(n.names()) != 2 {
		t.Fatalf("chain %s, files %v", n.types(), n.names())
	}
	n.advance(calmAfter + maxDelay)
	n.put("10-flannel.conflist", strings.Replace(flannel, "cbr0", "cbr1", 1))
	if i.Install(t.Context()); !strings.Contains(n.read("02-own.conflist"), "cbr1") {
		t.Errorf("the owned list did not follow: %s", n.read("02-own.conflist"))
	}
}

// An owned list whose source is gone for good is removed, so that the runtime does not
// call a primary that was uninstalled. A source that is broken for a while keeps it.
func TestSourceIsGone(t *testing.T) {
	n := newTestNode(t)
	n.put("10-x.conf", calico)
	i := n.installer(nil)
	i.Install(t.Context())
	n.put("10-x.conf", calico[:20])
	i.Install(t.Context())
	n.advance(orphanGrace)
	if s := i.Install(t.Context()); !s.Chained || n.types() != "calico,portolan" {
		t.Fatalf("source broken: state %+v, chain %s", s, n.types())
	}
	n.remove("10-x.conf")
	i.Install(t.Context())
	n.advance(orphanGrace - time.Second)
	if s := i.Install(t.Context()); !s.Chained {
		t.Fatalf("source just gone: %+v", s)
	}
	n.advance(time.Second)
	if s := i.Install(t.Context()); s.Chained || len(n.names()) != 0 || !strings.Contains(s.Problem, "install the primary CNI plugin") {
		t.Errorf("source gone: state %+v, files %v", s, n.names())
	}
}

// A primary that had its file open when we replaced it writes into a file without a
// name; what it wrote is taken over, whenever it comes.
func TestLateWriter(t *testing.T) {
	n := newTestNode(t)
	n.put("10-flannel.conflist", flannel)
	f, err := os.OpenFile(filepath.Join(n.conf, "10-flannel.conflist"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	i := n.installer(nil)
	i.Install(t.Context())
	late := strings.Replace(flannel, "cbr0", "cbr1", 1)
	for _, part := range []string{late[:30], late[30:]} {
		if part == late[:30] {
			if err := f.Truncate(0); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := f.WriteString(part); err != nil {
			t.Fatal(err)
		}
		i.Install(t.Context())
		if n.types() != "flannel,portmap,portolan" {
			t.Fatalf("chain %s", n.types())
		}
	}
	if got, err := Remove([]byte(n.read("10-flannel.conflist"))); err != nil || string(got) != late {
		t.Errorf("the late write is lost: %s, %v", got, err)
	}
	if i.replaced != nil {
		i.replaced.close()
	}
}

// A file that changes between reading and replacing keeps the change.
func TestChangedMeanwhile(t *testing.T) {
	n := newTestNode(t)
	path := filepath.Join(n.conf, "10-flannel.conflist")
	n.put("10-flannel.conflist", flannel)
	for _, old := range [][]byte{[]byte("something older"), nil} {
		if err := replaceConf(path, old, []byte("ours")); err == nil || n.read("10-flannel.conflist") != flannel {
			t.Errorf("%v, file %s", err, n.read("10-flannel.conflist"))
		}
	}
	if err := replaceConf(filepath.Join(n.conf, "gone.conflist"), []byte("x"), []byte("ours")); err == nil {
		t.Error("a file that is gone was made again")
	}
	left, err := filepath.Glob(filepath.Join(n.conf, ".portolan-*.tmp"))
	if err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
