// Package registrytest is the test of what every registry.Backend promises,
// wherever it keeps its records. Only tests import it.
package registrytest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
)

// Patience is how long a test waits for what must come; it matters only when
// something is broken.
const Patience = 30 * time.Second

// Node is the node of every record of Endpoint.
const Node = "node1"

// Endpoint returns a valid record that uses every field. Its sandbox is named after
// the UID.
func Endpoint(uid string, generation uint64) model.Endpoint {
	return model.Endpoint{
		UID: uid, Generation: generation, Since: time.Unix(1_700_000_000, 5).UTC(),
		Service:   model.ServiceKey{Namespace: "shop", Name: "payments"},
		Identity:  model.Identity{TrustDomain: "aether.internal", Namespace: "shop", Account: "checkout"},
		Addresses: []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::1")},
		Default:   8080,
		Ports: []model.PortStatus{
			{Port: port.Port{Number: 5432, Protocol: port.TCP}, Health: model.Draining},
			{Port: port.Port{Number: 8080, Protocol: port.HTTP}, Health: model.Healthy},
			{Port: port.Port{Number: 9090, Protocol: port.H2}},
		},
		Weight: 7, Locality: model.Locality{Region: "eu", Zone: "eu-1"}, Metadata: map[string]string{"version": "v1"},
		PodName: "payments-1", Node: Node, ContainerID: strings.TrimSuffix(uid, "-eth0"),
	}
}

// Log records the events of a watch as short texts, and what a reader then knows.
type Log struct {
	mu      sync.Mutex
	list    []string
	view    map[string]model.Endpoint
	changed chan struct{}
}

// Follow watches b until the test ends; Synced, View and Await say what came.
func Follow(t *testing.T, b registry.Backend) *Log {
	t.Helper()
	l := &Log{view: map[string]model.Endpoint{}, changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = b.Watch(ctx, l.take)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return l
}

func (l *Log) take(ev registry.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := ev.Kind.String()
	switch ev.Kind {
	case registry.Upsert:
		l.view[ev.UID] = ev.Endpoint
		text = fmt.Sprintf("%s %s %d", ev.Kind, ev.UID, ev.Generation)
	case registry.Delete:
		delete(l.view, ev.UID)
		text = fmt.Sprintf("%s %s %d", ev.Kind, ev.UID, ev.Generation)
	case registry.Complete:
	}
	l.list = append(l.list, text)
	close(l.changed)
	l.changed = make(chan struct{})
}

// Take returns what came since the last call.
func (l *Log) Take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.list
	l.list = nil
	return list
}

// Await waits until what the reader knows, and the events that it has, fulfil met.
func (l *Log) Await(t *testing.T, what string, met func(view map[string]model.Endpoint, events []string) bool) {
	t.Helper()
	timer := time.NewTimer(Patience)
	defer timer.Stop()
	for {
		l.mu.Lock()
		ok, changed := met(l.view, l.list), l.changed
		view, list := l.generations(), slices.Clone(l.list)
		l.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			t.Fatalf("%s does not come; the reader knows %v after %v", what, view, list)
		}
	}
}

// generations of the view; the caller holds mu.
func (l *Log) generations() map[string]uint64 {
	out := make(map[string]uint64, len(l.view))
	for uid, ep := range l.view {
		out[uid] = ep.Generation
	}
	return out
}

// AwaitComplete waits for the marker.
func (l *Log) AwaitComplete(t *testing.T) {
	t.Helper()
	l.Await(t, "complete", func(_ map[string]model.Endpoint, events []string) bool { return slices.Contains(events, "complete") })
}

// AwaitUIDs waits until the reader knows exactly the records of these UIDs.
func (l *Log) AwaitUIDs(t *testing.T, uids ...string) {
	t.Helper()
	slices.Sort(uids)
	l.Await(t, fmt.Sprint(uids), func(view map[string]model.Endpoint, _ []string) bool {
		known := make([]string, 0, len(view))
		for uid := range view {
			known = append(known, uid)
		}
		slices.Sort(known)
		return slices.Equal(known, uids)
	})
}

// AwaitGeneration waits until the reader knows the record at this generation.
func (l *Log) AwaitGeneration(t *testing.T, uid string, generation uint64) model.Endpoint {
	t.Helper()
	var got model.Endpoint
	l.Await(t, fmt.Sprintf("generation %d of %s", generation, uid), func(view map[string]model.Endpoint, _ []string) bool {
		got = view[uid]
		return got.Generation == generation
	})
	return got
}

// Conform tests a backend that opens empty: open is called once for each test and
// closes what it opens at the test's end; the records are of Node.
func Conform(t *testing.T, open func(t *testing.T) registry.Backend) {
	t.Helper()
	t.Run("watch", func(t *testing.T) { watch(t, open(t)) })
	t.Run("generations", func(t *testing.T) { generations(t, open(t)) })
	t.Run("retain", func(t *testing.T) { retain(t, open(t)) })
	t.Run("copies", func(t *testing.T) { copies(t, open(t)) })
	t.Run("refused", func(t *testing.T) { refused(t, open(t)) })
	t.Run("ends", func(t *testing.T) { ends(t, open(t)) })
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A watch gives every record, complete once, then every change in its order; a late
// one gets what there is (contract 4.7).
func watch(t *testing.T, b registry.Backend) {
	t.Helper()
	early := Follow(t, b)
	early.AwaitComplete(t)
	for i, uid := range []string{"a-eth0", "b-eth0", "c-eth0"} {
		must(t, b.Publish(t.Context(), Endpoint(uid, uint64(i)+1)))
		early.AwaitGeneration(t, uid, uint64(i)+1)
	}
	client := Endpoint("client-eth0", 3)
	client.Default, client.Ports = 0, nil
	must(t, b.Publish(t.Context(), client))
	early.AwaitGeneration(t, client.UID, 3)
	must(t, b.Publish(t.Context(), Endpoint("a-eth0", 9)))
	early.AwaitGeneration(t, "a-eth0", 9)
	must(t, b.Withdraw(t.Context(), "b-eth0", 5))
	early.AwaitUIDs(t, "a-eth0", "c-eth0", "client-eth0")
	want := []string{"complete", "upsert a-eth0 1", "upsert b-eth0 2", "upsert c-eth0 3", "upsert client-eth0 3", "upsert a-eth0 9", "delete b-eth0 5"}
	if got := early.Take(); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	late := Follow(t, b)
	late.AwaitComplete(t)
	if got, want := late.Take(), []string{"upsert a-eth0 9", "upsert c-eth0 3", "upsert client-eth0 3", "complete"}; !slices.Equal(got, want) {
		t.Errorf("a late watch got %v, want %v", got, want)
	}
	late.Await(t, "records as they were published", func(view map[string]model.Endpoint, _ []string) bool {
		return reflect.DeepEqual(view, map[string]model.Endpoint{"a-eth0": Endpoint("a-eth0", 9), "c-eth0": Endpoint("c-eth0", 3), client.UID: client})
	})
}

// Of the writers of a UID the highest generation wins, and what was withdrawn stays
// withdrawn (XDS-47, contract 5: stale DEL).
func generations(t *testing.T, b registry.Backend) {
	t.Helper()
	log := Follow(t, b)
	log.AwaitComplete(t)
	for i, step := range []struct {
		generation uint64
		withdraw   bool
		stale      bool
	}{
		{generation: 5},
		{generation: 5, stale: true},
		{generation: 4, stale: true},
		{generation: 4, withdraw: true, stale: true},
		{generation: 6},
		{generation: 6, withdraw: true},
		{generation: 6, stale: true},
		{generation: 9, withdraw: true},
		{generation: 8, stale: true},
		{generation: 10},
	} {
		var err error
		if step.withdraw {
			err = b.Withdraw(t.Context(), "a-eth0", step.generation)
		} else {
			err = b.Publish(t.Context(), Endpoint("a-eth0", step.generation))
		}
		if errors.Is(err, registry.ErrStale) != step.stale || !step.stale && err != nil {
			t.Errorf("step %d: %v", i, err)
		}
	}
	log.AwaitGeneration(t, "a-eth0", 10)
	must(t, b.Withdraw(t.Context(), "nobody", 1))
}

// What a crash left of pods that are not attached is withdrawn (contract 4.8).
func retain(t *testing.T, b registry.Backend) {
	t.Helper()
	log := Follow(t, b)
	must(t, b.Publish(t.Context(), Endpoint("a-eth0", 1)))
	must(t, b.Retain(t.Context(), []string{"a-eth0", "late-eth0"}))
	must(t, b.Publish(t.Context(), Endpoint("late-eth0", 1)))
	log.AwaitUIDs(t, "a-eth0", "late-eth0")
}

// A record belongs to whoever holds it (MESH-23).
func copies(t *testing.T, b registry.Backend) {
	t.Helper()
	ep := Endpoint("a-eth0", 1)
	must(t, b.Publish(t.Context(), ep))
	spoil := func(ep model.Endpoint) {
		ep.Addresses[0], ep.Ports[0].Number, ep.Metadata["version"] = netip.MustParseAddr("192.0.2.1"), 1, "spoilt"
	}
	spoil(ep)
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	_ = b.Watch(ctx, func(ev registry.Event) {
		if ev.Kind == registry.Upsert {
			spoil(ev.Endpoint)
			cancel()
		}
	})
	if got := Follow(t, b).AwaitGeneration(t, "a-eth0", 1); !reflect.DeepEqual(got, Endpoint("a-eth0", 1)) {
		t.Errorf("somebody else's change is seen: %+v", got)
	}
}

// What cannot be a record is refused with its reason, and changes nothing.
func refused(t *testing.T, b registry.Backend) {
	t.Helper()
	noAddress, otherIdentity := Endpoint("a-eth0", 1), Endpoint("b-eth0", 1)
	noAddress.Addresses = nil
	otherIdentity.Identity.Namespace = "other"
	for want, ep := range map[string]model.Endpoint{"it has no address": noAddress, "namespace shop": otherIdentity, "UID of 0 bytes": Endpoint("", 1)} {
		if err := b.Publish(t.Context(), ep); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want it to say %q", err, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, err := range map[string]error{"Publish": b.Publish(ctx, Endpoint("c-eth0", 1)), "Withdraw": b.Withdraw(ctx, "c-eth0", 1)} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s of a caller who has gone: %v", name, err)
		}
	}
	log := Follow(t, b)
	log.AwaitComplete(t)
	log.AwaitUIDs(t)
}

// A watch ends with its context or with the backend; a closed one takes nothing.
func ends(t *testing.T, b registry.Backend) {
	t.Helper()
	closer, ok := b.(interface{ Close() error })
	if !ok {
		t.Fatalf("%T has no Close", b)
	}
	must(t, b.Publish(t.Context(), Endpoint("a-eth0", 1)))
	ctx, cancel := context.WithCancel(t.Context())
	complete := func(then func()) func(registry.Event) {
		return func(ev registry.Event) {
			if ev.Kind == registry.Complete {
				then()
			}
		}
	}
	if err := b.Watch(ctx, complete(cancel)); !errors.Is(err, context.Canceled) {
		t.Errorf("the watch of a reader who has gone ended with %v", err)
	}
	closed := make(chan error, 1)
	if err := b.Watch(t.Context(), complete(func() { go func() { closed <- closer.Close() }() })); !errors.Is(err, registry.ErrClosed) {
		t.Errorf("the watch of a closed registry ended with %v", err)
	}
	must(t, <-closed)
	must(t, closer.Close())
	for name, err := range map[string]error{
		"Publish":  b.Publish(t.Context(), Endpoint("b-eth0", 1)),
		"Withdraw": b.Withdraw(t.Context(), "a-eth0", 2),
		"Watch":    b.Watch(t.Context(), func(registry.Event) {}),
	} {
		if !errors.Is(err, registry.ErrClosed) {
			t.Errorf("%s after Close: %v", name, err)
		}
	}
}
