package projection

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// store is what a publisher keeps on disk: the entries that Changes asked to save.
type store map[string]Entry

// save follows the changes.
func (s store) save(e *Engine, changes []Change) {
	for _, c := range changes {
		if !c.Entry {
			continue
		}
		if entry, ok := e.Entry(c.Service); ok {
			s[c.Service.String()] = entry
		} else {
			delete(s, c.Service.String())
		}
	}
}

func (s store) entries() []Entry {
	var out []Entry
	for _, entry := range s {
		out = append(out, entry)
	}
	return out
}

// allViews returns every View without what a restart may change: tokens, and aliases,
// which Envoy asks for again.
func allViews(e *Engine) []View {
	var out []View
	for k := range e.Services() {
		v, _ := e.View(k)
		v.Token = 0
		v.Clusters = slices.DeleteFunc(v.Clusters, func(c Cluster) bool { return e.find(c.Name).reach == alias })
		out = append(out, v)
	}
	return out
}

// A restart in every step of every kind of change gives the same Views, goes on from the
// step where it was and ends the same (contract 4.8; projection's part of "unchanged
// resources are not sent again"). Only what Changes asked to save is there.
func TestRestartGoesOn(t *testing.T) {
	pods := func(e *Engine) {
		upsert(t, e, pod("b", "shop/x", "10.0.0.2", "9090*+"), pod("s", "default/s", "10.0.0.3", "5432=tcp+ 8080*+ 9090=h2+"),
			pod("i", "default/idle", "10.0.0.4", "5432=tcp+ 8080*+"))
	}
	change := func(e *Engine) {
		upsert(t, e, pod("a", "default/x", "10.0.0.1", "8080*+ 9090+"), pod("s", "default/s", "10.0.0.3", "5432=tcp+ 8080+ 9090=h2*+"))
		if e.records["i"] != nil {
			remove(e, "i")
		}
	}
	for steps := range 20 {
		e, disk := newEngine(t, twoFlat()), store{}
		pods(e)
		disk.save(e, e.TakeDirty())
		change(e)
		disk.save(e, e.TakeDirty())
		for i := range steps {
			if i == 10 {
				disk.save(e, e.TakeDirty())
				e.Expire(t0.Add(DefaultRetention))
			}
			for k := range e.Services() {
				if v, _ := e.Shape(k); v.Step != Settled && e.Advance(k, v.Token) {
					break
				}
			}
			disk.save(e, e.TakeDirty())
		}
		again, err := New(twoFlat(), disk.entries(), t0.Add(time.Minute))
		if err != nil {
			t.Fatalf("after %d steps: %v", steps, err)
		}
		upsert(t, again, pod("b", "shop/x", "10.0.0.2", "9090*+"))
		change(again)
		if len(again.TakeDirty()) != 0 {
			t.Error("something is told before the registry is synced")
		}
		again.Synced()
		var told []string
		for _, c := range again.TakeDirty() {
			if c.Shape && c.Clusters {
				told = append(told, c.Service.String())
			}
		}
		var known []string
		for k := range e.Services() {
			known = append(known, k.String())
		}
		check(t, "every service is told", told, known)
		check(t, "views", allViews(again), allViews(e))
		rest(e)
		rest(again)
		check(t, "views at rest", allViews(again), allViews(e))
		checkReferences(t, again)
		if t.Failed() {
			t.Fatalf("after %d steps", steps)
		}
	}
}

// A service without endpoints is known over a restart for the rest of its retention; one
// whose pods did not come back begins it. The accounts stay pinned (I4).
func TestRestartRetention(t *testing.T) {
	e, disk := newEngine(t, testConfig()), store{}
	other := pod("a", "default/s", "10.0.0.1", "5432=tcp+ 8080*+")
	other.Identity.Account = "old"
	upsert(t, e, other, pod("b", "default/s", "10.0.0.2", "8080*+"), pod("c", "default/lost", "10.0.0.3", "8080*+"))
	disk.save(e, e.TakeDirty())
	e.Delete("a", 1, t0.Add(time.Minute))
	e.Delete("b", 1, t0.Add(2*time.Minute))
	disk.save(e, e.TakeDirty())
	want := view(t, e, "default/s")

	now := t0.Add(5 * time.Minute)
	again, err := New(testConfig(), disk.entries(), now)
	if err != nil {
		t.Fatal(err)
	}
	if next := again.Expire(now.Add(time.Hour)); !next.IsZero() || view(t, again, "default/s").Step != Settled {
		t.Error("something expires before the registry is synced")
	}
	again.now = now
	again.Synced()
	disk.save(again, again.TakeDirty())
	got := view(t, again, "default/s")
	got.Token, want.Token = 0, 0
	check(t, "view", got, want)
	check(t, "identities", got.Clusters[0].Identities, []string{"spiffe://aether.internal/ns/default/sa/old", "spiffe://aether.internal/ns/default/sa/s"})
	if next := again.Expire(now); !next.Equal(t0.Add(12 * time.Minute)) {
		t.Errorf("s expires at %s", next)
	}
	if last := disk["default/lost"].LastSeen; !last.Equal(now) {
		t.Errorf("the pods that did not come back are last seen at %s", last)
	}
}

// A resync drops what is not told again, nothing before it is complete (MESH-14, XDS-43).
func TestResync(t *testing.T) {
	e := newEngine(t, testConfig(), pod("a", "default/s", "10.0.0.1", "8080*+"), pod("b", "default/s", "10.0.0.2", "8080*+"))
	e.BeginSync()
	if err := e.Upsert(pod("a", "default/s", "10.0.0.1", "8080*+"), t0); err != nil {
		t.Fatal(err)
	}
	check(t, "during", clusters(view(t, e, "default/s")), []string{"s 8080 http: a b"})
	if c := e.TakeDirty(); len(c) != 0 {
		t.Errorf("changes: %+v", c)
	}
	e.Synced()
	check(t, "after", clusters(view(t, e, "default/s")), []string{"s 8080 http: a"})
	if err := e.Upsert(pod("b", "default/s", "10.0.0.2", "8080*+"), t0); err != nil {
		t.Fatal(err)
	}
	check(t, "a late update of what was dropped", clusters(view(t, e, "default/s")), []string{"s 8080 http: a"})
}

// New refuses entries that it cannot have written, and names the service.
func TestNewRefusesEntries(t *testing.T) {
	good := func() Entry {
		return Entry{
			Service: key("default/s"), VIP4: netip.MustParseAddr("198.18.0.9"), VIP6: netip.MustParseAddr("fd70:6f72:746f::9"),
			Ports: []port.Port{{Number: 8080, Protocol: port.HTTP}}, Default: 8080,
			Committed: port.Port{Number: 8080, Protocol: port.HTTP}, Flat: true,
		}
	}
	for _, tt := range []struct {
		name, want string
		entries    func() []Entry
	}{
		{"good", "", func() []Entry { return []Entry{good()} }},
		{"twice", "it is saved twice, with offsets 9 and that of 198.18.0.9", func() []Entry { return []Entry{good(), good()} }},
		{"twice without address", "it is saved twice", func() []Entry {
			n := good()
			n.VIP4 = netip.Addr{}
			return []Entry{n, n}
		}},
		{"ports", "it has no ports", func() []Entry { n := good(); n.Ports = nil; return []Entry{n} }},
		{"order", "ports are not ascending from 1 at 8080", func() []Entry { n := good(); n.Ports = append(n.Ports, n.Ports...); return []Entry{n} }},
		{"default", "default port 1 is not among its ports", func() []Entry { n := good(); n.Default = 1; return []Entry{n} }},
		{"committed", "committed port 8080 is no HTTP port", func() []Entry { n := good(); n.Committed.Protocol = port.TCP; return []Entry{n} }},
		{"step", "step 8 is unknown", func() []Entry { n := good(); n.Step = lastStep + 1; return []Entry{n} }},
		{"moving nothing", "it is moving without a committed port", func() []Entry { n := good(); n.Step, n.Committed = Moving, port.Port{}; return []Entry{n} }},
		{"sorted", "accounts or retired names are not sorted", func() []Entry { n := good(); n.Accounts = []string{"b", "a"}; return []Entry{n} }},
		{"releasing nothing", "it is releasing without the flat name", func() []Entry { n := good(); n.Step, n.Flat = Releasing, false; return []Entry{n} }},
		{"claiming its own", "it is claiming with the flat name", func() []Entry { n := good(); n.Step = Claiming; return []Entry{n} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := New(testConfig(), tt.entries(), t0)
			want := "projection: saved service default/s: " + tt.want
			if tt.want == "" != (err == nil) || err != nil && err.Error() != want {
				t.Errorf("got  %v\nwant %s", err, want)
			}
		})
	}
	other := good()
	other.Service = key("shop/t")
	other.Flat = false
	_, err := New(testConfig(), []Entry{good(), other}, t0)
	if err == nil || err.Error() != "projection: saved service shop/t: address 198.18.0.9 belongs to both default/s and shop/t" {
		t.Errorf("one address twice: %v", err)
	}
	other.VIP4, other.Service, other.Flat = netip.MustParseAddr("198.18.0.10"), key("shop/s"), true
	_, err = New(testConfig(), []Entry{good(), other}, t0)
	if err == nil || err.Error() != "projection: saved service shop/s: its flat name belongs to two services" {
		t.Errorf("one name twice: %v", err)
	}
	var bad *EntryError
	if !errors.As(err, &bad) || bad.Service != other.Service {
		t.Errorf("the error does not name the entry to leave out: %#v", err)
	}
}

// Another range by flag: every service gets an address of the new range, forgotten ones
// are dropped from the disk, and the rest is as it was.
func TestRangeChanges(t *testing.T) {
	e, disk := newEngine(t, testConfig()), store{}
	upsert(t, e, pod("a", "default/s", "10.0.0.1", "8080*+"), pod("b", "default/old", "10.0.0.2", "8080*+"))
	disk.save(e, e.TakeDirty())
	remove(e, "b")
	e.Expire(t0.Add(DefaultRetention))
	rest(e)
	disk.save(e, e.TakeDirty())
	if entry := disk["default/old"]; !entry.ReleasedAt.Equal(t0.Add(DefaultRetention)) || !entry.VIP4.IsValid() || entry.Ports != nil {
		t.Errorf("the forgotten service's entry: %+v", entry)
	}
	cfg := testConfig()
	cfg.VIP4 = netip.MustParsePrefix("10.99.0.0/16")
	again, err := New(cfg, disk.entries(), t0)
	if err != nil {
		t.Fatal(err)
	}
	upsert(t, again, pod("a", "default/s", "10.0.0.1", "8080*+"))
	again.Synced()
	disk.save(again, again.TakeDirty())
	if v := view(t, again, "default/s"); !cfg.VIP4.Contains(v.VIP4) || disk["default/s"].VIP4 != v.VIP4 {
		t.Errorf("address %s, saved %s", v.VIP4, disk["default/s"].VIP4)
	}
	if _, ok := disk["default/old"]; ok {
		t.Error("the forgotten service's address of another range is kept")
	}
}

// FuzzSaved gives New entries of any content; how they are read from bytes is
// FuzzLoad's, of package catalogue. What is taken is sound: it is routed by unique
// names (I6), pods can join it, every step comes to its end, and what is saved then
// is taken again.
func FuzzSaved(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{2, 0, 2, 2, 1, 0, 2, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{4, 0, 0, 1, 1, 3, 1, 0, 1, 2, 0, 3, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 2, 5, 1, 1, 2, 0, 4, 0, 0, 1, 2, 1, 0})
	f.Add([]byte{2, 0, 2, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0})                       // default/s.shop, shop/s
	for _, once := range []string{"1201181018010000100000000000", "120290000008010001020000", "12010800080100002", "120118100811800010"} { // retired names
		f.Add([]byte(once))
	}
	f.Add([]byte("8811101028!1010002111011082")) // a flat name that one service has and another claims
	f.Add([]byte("a service in every step, with names that were another's"))
	f.Add([]byte("\x03\x00\x00\x01\x01\x01\x01\x02\x01\x00\x01\x06\x03\x00\x01\x01\x01\x01\x02\x01\x00\x00\x05"))
	f.Fuzz(func(t *testing.T, data []byte) {
		e := takeSaved(t, anyEntries(data))
		e.Synced()
		checkReferences(t, e)
		upsert(t, e, pod("s", "default/s", "10.0.0.3", "5432=tcp+ 8080*+ 9090=h2+"), pod("x", "shop/x", "10.0.0.2", "9090*+"))
		checkReferences(t, e)
		rest(e)
		checkReferences(t, e)
		again := store{}
		for k := range e.Services() {
			if entry, ok := e.Entry(k); ok {
				again[k.String()] = entry
			}
		}
		if _, err := New(twoFlat(), again.entries(), t0); err != nil {
			t.Fatalf("what was taken is not taken again: %v", err)
		}
	})
}

// anyEntries makes up to five entries out of bytes.
func anyEntries(data []byte) []Entry {
	choose := func(n int) int {
		if len(data) == 0 {
			return 0
		}
		b := data[0]
		data = data[1:]
		return int(b) % n
	}
	names := []string{"s", "x", "s.shop", "", "X", "shop"}
	anyPort := func() port.Port {
		return port.Port{Number: []uint16{8080, 9090, 5432, 80, 0, 65535}[choose(6)], Protocol: port.Protocol(choose(5))}
	}
	texts := func() (out []string) {
		for range choose(3) {
			out = append(out, []string{"s.aether.internal:9090", "s.aether.internal", "x.shop.aether.internal:1", ""}[choose(4)])
		}
		return out
	}
	entries := make([]Entry, choose(6))
	for i := range entries {
		n := &entries[i]
		n.Service = model.ServiceKey{Namespace: []string{"default", "shop", "ops", "", "a.b"}[choose(5)], Name: names[choose(len(names))]}
		for range choose(4) {
			n.Ports = append(n.Ports, anyPort())
		}
		n.Default, n.Committed = anyPort().Number, anyPort()
		n.Step, n.Flat = Step(choose(int(lastStep)+2)), choose(2) == 1
		n.VIP4 = []netip.Addr{{}, netip.MustParseAddr("198.18.0.9"), netip.MustParseAddr("198.19.0.1"), netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd70:6f72:746f::9")}[choose(5)]
		n.ReleasedAt = []time.Time{{}, {}, {}, t0.Add(-time.Hour)}[choose(4)]
		n.LastSeen = []time.Time{{}, t0, t0.Add(time.Hour)}[choose(3)]
		n.Accounts, n.Retired = texts(), texts()
	}
	return entries
}

// takeSaved leaves out what New refuses, one entry after the other.
func takeSaved(t *testing.T, saved []Entry) *Engine {
	t.Helper()
	for {
		e, err := New(twoFlat(), saved, t0)
		if err == nil {
			return e
		}
		unfit, ok := errors.AsType[*EntryError](err)
		if !ok {
			t.Fatal(err)
		}
		left := slices.DeleteFunc(slices.Clone(saved), func(e Entry) bool { return e.Service == unfit.Service })
		if len(left) == len(saved) {
			t.Fatalf("%v: there is no such entry", err)
		}
		saved = left
	}
}
