package topology

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	bolt "go.etcd.io/bbolt"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// api is an API server that hangs until it has an answer.
type api struct {
	mu     sync.Mutex
	labels map[string]string // nil: it hangs
	err    error
	asked  int
}

func (a *api) Get(ctx context.Context, name string, _ metav1.GetOptions) (*corev1.Node, error) {
	a.mu.Lock()
	labels, err := a.labels, a.err
	a.asked++
	a.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case labels == nil:
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, nil
}

func (a *api) answer(region, zone string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.labels, a.err = map[string]string{}, nil
	if region != "" {
		a.labels[corev1.LabelTopologyRegion] = region
	}
	if zone != "" {
		a.labels[corev1.LabelTopologyZone] = zone
	}
}

func (a *api) fail(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = err
}

func (a *api) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.asked
}

func database(t *testing.T) *bolt.DB {
	t.Helper()
	db, err := bolt.Open(filepath.Join(t.TempDir(), "state.db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func open(t *testing.T, db *bolt.DB, client Client, node string) *Node {
	t.Helper()
	n, err := Open(Config{Client: client, Node: node, DB: db, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

var (
	none  = model.Locality{}
	north = model.Locality{Region: "eu", Zone: "eu-north"}
	south = model.Locality{Region: "eu", Zone: "eu-south"}
)

// run runs n and returns what it told so far.
func run(t *testing.T, n *Node) (told func() []model.Locality, stop func()) {
	t.Helper()
	var mu sync.Mutex
	var all []model.Locality
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- n.Run(ctx, func(_ context.Context, l model.Locality) {
			mu.Lock()
			defer mu.Unlock()
			all = append(all, l)
		})
	}()
	told = func() []model.Locality {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
	return told, func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
}

// A registrar that starts while the API server hangs has no place for two seconds'
// waiting, is told of it once the API server answers, and its successor has it at once
// although the API server hangs again. Labels that change are followed; an answer that
// is an error, and a node that is gone, change nothing.
func TestAPIServerHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := database(t)
		server := &api{}
		n := open(t, db, server, "node1")
		start := time.Now()
		if got := n.Locality(t.Context()); got != none || time.Since(start) != firstWait {
			t.Errorf("of nothing known: %v after %v", got, time.Since(start))
		}
		told, stop := run(t, n)
		time.Sleep(3 * time.Minute)
		if got := told(); len(got) != 0 {
			t.Errorf("told %v while the API server hangs", got)
		}
		if n := server.count(); n < 5 || n > 40 {
			t.Errorf("asked %d times in 3 minutes", n)
		}
		server.answer("eu", "eu-north")
		time.Sleep(maxPause + askTimeout)
		if got := told(); !slices.Equal(got, []model.Locality{north}) {
			t.Errorf("told %v, want %v", got, north)
		}
		server.fail(errors.New("no such node"))
		time.Sleep(time.Hour)
		if got := told(); len(got) != 1 {
			t.Errorf("an error told %v", got)
		}
		server.answer("eu", "eu-south")
		time.Sleep(period)
		if got := told(); !slices.Equal(got, []model.Locality{north, south}) {
			t.Errorf("told %v, want %v", got, south)
		}
		stop()

		hangs := &api{}
		successor := open(t, db, hangs, "node1")
		if got := successor.Locality(t.Context()); got != south || hangs.count() != 0 {
			t.Errorf("the successor knows %v after %d questions", got, hangs.count())
		}
		told, stop = run(t, successor)
		hangs.answer("", "")
		time.Sleep(time.Minute)
		if got := told(); !slices.Equal(got, []model.Locality{none}) {
			t.Errorf("labels were taken away: told %v", got)
		}
		stop()
		if got := open(t, db, &api{}, "node1").Locality(t.Context()); got != none {
			t.Errorf("labels were taken away: %v", got)
		}
	})
}

// A node that answers at the start is not asked twice then; nothing is told that is
// known; and what is stored of a node of another name is not this one's place.
func TestAnswersAtTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := database(t)
		server := &api{}
		server.answer("eu", "eu-north")
		n := open(t, db, server, "node1")
		if got := n.Locality(t.Context()); got != north {
			t.Errorf("got %v", got)
		}
		told, stop := run(t, n)
		if got := told(); len(got) != 0 || server.count() != 1 {
			t.Errorf("told %v after %d questions", got, server.count())
		}
		time.Sleep(10 * period)
		if got := told(); len(got) != 0 || server.count() < 10 || server.count() > 15 {
			t.Errorf("told %v after %d questions", got, server.count())
		}
		stop()
		if got := open(t, db, &api{}, "node2").Locality(t.Context()); got != none {
			t.Errorf("node2 is at %v", got)
		}
	})
}
