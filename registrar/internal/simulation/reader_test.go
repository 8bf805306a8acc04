package simulation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/unixsocket"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/server"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

const (
	readerChanges = 10_000
	// patience bounds the wait for what must come.
	patience = 60 * time.Second
	// flagship is the first reader's part: an Envoy, whose word the steps wait for.
	flagship = 0
)

// ledger is what was ever true of the records, so that a response can be held to its
// own time. Readers ask it while the writer writes.
type ledger struct {
	mu sync.Mutex
	contract
	known known
	// changes counts; since is the count at the last rest. served says when an address
	// last served a port, defaults and owners what names meant since the last rest.
	changes, since int
	served         map[place]int
	defaults       map[model.ServiceKey]map[uint16]bool
	owners         map[string]map[model.ServiceKey]bool
	// retired are ports that were a service's default once, last the latest of them: a
	// service whose endpoints are all gone keeps it.
	retired map[model.ServiceKey]map[uint16]bool
	last    map[model.ServiceKey]uint16
}

func newLedger() *ledger {
	return &ledger{
		contract: contract{records: map[string]model.Endpoint{}}, known: known{}, served: map[place]int{},
		defaults: map[model.ServiceKey]map[uint16]bool{}, owners: map[string]map[model.ServiceKey]bool{},
		retired: map[model.ServiceKey]map[uint16]bool{}, last: map[model.ServiceKey]uint16{},
	}
}

// place is one port of a service at an address.
type place struct {
	service model.ServiceKey
	port    uint16
	class   port.Class
	addr    netip.Addr
}

// change makes one change of the records and notes what is true after it. It is
// called before the registry is told, so that no reader sees it first.
func (l *ledger) change(uid string, ep *model.Endpoint) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ep == nil {
		delete(l.records, uid)
	} else {
		l.records[uid] = *ep
		l.known[ep.Service] = true
	}
	l.changes++
	l.note()
}

// note takes down what is true now; of what was true before the change, it was the
// last moment.
func (l *ledger) note() {
	for key := range l.known {
		eps := l.of(key)
		if l.defaults[key] == nil {
			l.defaults[key] = map[uint16]bool{}
		}
		if l.retired[key] == nil {
			l.retired[key] = map[uint16]bool{}
		}
		if def := defaultPort(eps); def != 0 {
			l.last[key] = def
		}
		l.retired[key][l.last[key]] = true
		l.defaults[key][l.last[key]] = true
		// A watch tells the latest of each record, not the history of all: what the
		// records decide together may have been another thing for a moment.
		for _, ep := range eps {
			l.defaults[key][ep.Default] = true
		}
	}
	for _, ep := range l.records {
		for _, s := range ep.Ports {
			if s.Health != model.Unhealthy {
				l.served[place{ep.Service, s.Number, s.Protocol.Class(), ep.Addresses[0]}] = l.changes
			}
		}
	}
	for _, label := range []string{"x", "y", "z"} {
		name := label + "." + domain
		if key, _, ok := l.known.named(name); ok {
			if l.owners[name] == nil {
				l.owners[name] = map[model.ServiceKey]bool{}
			}
			l.owners[name][key] = true
		}
	}
}

// rest begins a new window: everything that was sent is with its reader.
func (l *ledger) rest() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since = l.changes
	clear(l.defaults)
	clear(l.owners)
	l.note()
}

// wrong names an endpoint of a load assignment that served its port at no moment
// since the last rest, if there is one.
func (l *ledger) wrong(name string, got set) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	host, text, explicit := strings.Cut(name, ":")
	number, _ := strconv.ParseUint(text, 10, 16)
	keys := maps.Clone(l.owners[host])
	if keys == nil {
		keys = map[model.ServiceKey]bool{}
	}
	if key, _, ok := l.known.named(host); ok {
		keys[key] = true
	}
	for addr := range got {
		right := false
		for key := range keys {
			ports := l.defaults[key]
			if explicit {
				ports = map[uint16]bool{uint16(number): true}
			}
			for p := range ports {
				at, ok := l.served[place{key, p, port.ClassHTTP, addr}]
				right = right || ok && at >= l.since
			}
		}
		if !right {
			return fmt.Sprintf("%s has %s, which did not serve it since change %d (now %d)", name, addr, l.since, l.changes)
		}
	}
	return ""
}

// reader is one independent client with both of its streams.
type reader struct {
	t      *testing.T
	ledger *ledger
	node   *corev3.Node
	path   string
	r      *rand.Rand
	// moods: whether it rejects or withholds now and then.
	moody bool

	conn    *xdstest.Conn
	ads, od *xdstest.Client
	asked   map[string]bool // clusters, on demand
	only    map[string]bool // load assignments alone
	decoded *decoded

	mu       sync.Mutex // guards what follows: the streams' goroutines write it
	judges   *rand.Rand
	quiet    bool // about to rest: everything is acknowledged
	rejected bool
	fault    string
}

func (rd *reader) open(ads, od map[string]*xdstest.State) {
	rd.t.Helper()
	var err error
	rd.conn, err = xdstest.Dial("unix://" + rd.path)
	must(rd.t, err)
	opts := xdstest.Options{Node: rd.node, Judge: rd.judge}
	rd.ads, err = rd.conn.ADS(context.Background(), opts)
	must(rd.t, err)
	rd.od, err = rd.conn.Clusters(context.Background(), opts)
	must(rd.t, err)
	for _, c := range []struct {
		client *xdstest.Client
		had    map[string]*xdstest.State
	}{{rd.ads, ads}, {rd.od, od}} {
		for _, typeURL := range slices.Sorted(maps.Keys(c.had)) {
			if len(c.had[typeURL].Subscribed) > 0 {
				must(rd.t, c.client.Resume(typeURL, c.had[typeURL]))
			}
		}
	}
}

func (rd *reader) close() {
	_ = rd.conn.Close()
	<-rd.ads.Done()
	<-rd.od.Done()
}

// reconnect comes back with everything that it holds.
func (rd *reader) reconnect() {
	rd.t.Helper()
	rd.close()
	ads := map[string]*xdstest.State{}
	for _, typeURL := range []string{resource.ClusterType, resource.EndpointType, resource.ListenerType, resource.RouteType} {
		ads[typeURL] = rd.ads.State(typeURL)
	}
	od := map[string]*xdstest.State{resource.ClusterType: rd.od.State(resource.ClusterType)}
	rd.mu.Lock()
	rd.rejected = false
	rd.mu.Unlock()
	rd.open(ads, od)
}

// judge checks every response as it comes, and rejects and dawdles.
func (rd *reader) judge(resp *discoveryv3.DeltaDiscoveryResponse) xdstest.Verdict {
	rd.mu.Lock()
	defer rd.mu.Unlock()
	if resp.GetTypeUrl() == resource.EndpointType {
		for _, r := range resp.GetResources() {
			name, got, err := readAssignment(r.GetResource())
			if err != nil || name != r.GetName() {
				rd.fault = fmt.Sprintf("load assignment %q of %q: %v", name, r.GetName(), err)
			} else if wrong := rd.ledger.wrong(name, got); wrong != "" {
				rd.fault = wrong
			}
		}
	}
	switch n := rd.judges.IntN(20); {
	case rd.quiet || !rd.moody:
	case n == 0 && rejectable(resp):
		rd.rejected = true
		return xdstest.Nack("not this one")
	case n < 4:
		return xdstest.Withhold()
	}
	return xdstest.Ack()
}

// rejectable is a response whose rejection holds up no change of a default port, which
// would be offered again only after seconds.
func rejectable(resp *discoveryv3.DeltaDiscoveryResponse) bool {
	for _, r := range resp.GetResources() {
		if !strings.Contains(r.GetName(), ":") {
			return false
		}
	}
	return resp.GetTypeUrl() == resource.EndpointType || resp.GetTypeUrl() == resource.ClusterType
}

// held is what a client holds of a type, without its history.
type held struct {
	resources  map[string]xdstest.Resource
	subscribed map[string]bool
}

func look(c *xdstest.Client, typeURL string) held {
	var out held
	_ = c.WaitFor(context.Background(), typeURL, func(s *xdstest.State) bool {
		out = held{resources: maps.Clone(s.Resources), subscribed: maps.Clone(s.Subscribed)}
		return true
	})
	return out
}

// decoded keeps what was decoded by its version: of equal bytes, once.
type decoded struct {
	mu          sync.Mutex
	clusters    map[string]wireCluster
	assignments map[string]set
}

func (d *decoded) cluster(r xdstest.Resource) (wireCluster, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c, ok := d.clusters[r.Version]
	if ok {
		return c, nil
	}
	c, err := readCluster(r.Body)
	d.clusters[r.Version] = c
	return c, err
}

func (d *decoded) assignment(r xdstest.Resource) (set, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	got, ok := d.assignments[r.Version]
	if ok {
		return got, nil
	}
	_, got, err := readAssignment(r.Body)
	d.assignments[r.Version] = got
	return got, err
}

// follow subscribes to the load assignments of clusters that came.
func (rd *reader) follow() {
	rd.t.Helper()
	clusters, eds := look(rd.od, resource.ClusterType), look(rd.ads, resource.EndpointType)
	var begin, end []string
	for name, r := range clusters.resources {
		c, err := rd.decoded.cluster(r)
		must(rd.t, err)
		if c.eds && !eds.subscribed[name] {
			begin = append(begin, name)
		}
	}
	for name := range eds.subscribed {
		if _, ok := clusters.resources[name]; !ok && !rd.only[name] {
			end = append(end, name)
		}
	}
	if len(begin) > 0 {
		must(rd.t, rd.ads.Subscribe(resource.EndpointType, begin...))
	}
	if len(end) > 0 {
		must(rd.t, rd.ads.Unsubscribe(resource.EndpointType, end...))
	}
}

// act does one random thing.
func (rd *reader) act(names []string) {
	rd.t.Helper()
	name := names[rd.r.IntN(len(names))]
	switch n := rd.r.IntN(20); {
	case n < 8:
		rd.asked[name] = true
		must(rd.t, rd.od.Subscribe(resource.ClusterType, name))
	case n < 11:
		rd.only[name] = true
		must(rd.t, rd.ads.Subscribe(resource.EndpointType, name))
	case n < 14 && rd.asked[name]:
		delete(rd.asked, name)
		must(rd.t, rd.od.Unsubscribe(resource.ClusterType, name))
	case n < 16 && rd.only[name]:
		delete(rd.only, name)
		if !rd.asked[name] {
			must(rd.t, rd.ads.Unsubscribe(resource.EndpointType, name))
		}
	case n == 16:
		rd.reconnect()
	default:
		rd.release()
	}
	rd.follow()
}

// release acknowledges what was withheld.
func (rd *reader) release() {
	rd.t.Helper()
	for _, typeURL := range []string{resource.ClusterType, resource.EndpointType} {
		must(rd.t, rd.ads.Release(typeURL))
		must(rd.t, rd.od.Release(typeURL))
	}
}

// differs says how what the reader holds is not yet what the contract says, if so.
func (rd *reader) differs() string {
	clusters, eds := look(rd.od, resource.ClusterType), look(rd.ads, resource.EndpointType)
	l := rd.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	leads := func(name string) (wireCluster, set, error) {
		r, ok := clusters.resources[name]
		if !ok {
			return wireCluster{}, set{}, nil
		}
		c, err := rd.decoded.cluster(r)
		if err != nil || !c.eds {
			return c, set{}, err
		}
		la, ok := eds.resources[name]
		if !ok {
			return c, nil, nil // not answered yet
		}
		got, err := rd.decoded.assignment(la)
		return c, got, err
	}
	for name := range rd.asked {
		want, number := l.reached(l.known, name)
		c, got, err := leads(name)
		if err != nil {
			return err.Error()
		}
		if refused := !c.eds && l.refusable(name, number); !maps.Equal(got, want) && !refused {
			return fmt.Sprintf("%s has %v, want %v (%+v)", name, got, want, c)
		}
		if c.eds && len(want) > 0 && c.sni != strconv.Itoa(int(number)) {
			return fmt.Sprintf("%s has SNI %q, want %d", name, c.sni, number)
		}
	}
	for name := range rd.only {
		want, number := l.reached(l.known, name)
		la, ok := eds.resources[name]
		if !ok {
			return "no load assignment " + name
		}
		got, err := rd.decoded.assignment(la)
		if err != nil {
			return err.Error()
		}
		// Without its cluster, only the name that the cluster itself has is a load
		// assignment's for sure.
		if other := len(got) == 0 && (l.isDefault(name, number) || !l.canonical(name)); !maps.Equal(got, want) && !other {
			return fmt.Sprintf("load assignment %s is %v, want %v", name, got, want)
		}
	}
	return ""
}

// refusable says whether who asks for a name may be refused it, because Envoy never
// asks for it: the route table leads the default port's own name to the portless
// cluster (I2), and every spelling of a port to the cluster of one of them, so one
// that was the default's once is not needed again.
func (l *ledger) refusable(name string, number uint16) bool {
	key, _, _ := l.known.named(name)
	return l.isDefault(name, number) || l.retired[key][number] && !l.canonical(name)
}

// isDefault says whether a name spells the default port of its service out.
func (l *ledger) isDefault(name string, number uint16) bool {
	host, _, explicit := strings.Cut(name, ":")
	_, def := l.reached(l.known, host)
	return explicit && def == number
}

// canonical says whether a name is the one that its service's clusters carry: the flat
// one, if it has that.
func (l *ledger) canonical(name string) bool {
	key, _, ok := l.known.named(name)
	host, _, _ := strings.Cut(name, ":")
	flat := key.Name + "." + domain
	owner, _, _ := l.known.named(flat)
	return ok && (host == flat || owner != key)
}

// await waits until every reader holds what the contract says.
func await(t *testing.T, readers []*reader, seen int) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for _, rd := range readers {
		rd.mu.Lock()
		rd.quiet = true
		again := rd.rejected
		rd.mu.Unlock()
		if again {
			rd.reconnect() // it kept what it rejected the successor of
		}
	}
	for {
		differ := ""
		for i, rd := range readers {
			rd.release()
			rd.follow()
			if d := rd.differs(); d != "" && differ == "" {
				differ = fmt.Sprintf("reader %d: %s", i, d)
			}
			rd.mu.Lock()
			fault := rd.fault
			rd.mu.Unlock()
			if fault != "" {
				t.Fatalf("reader %d after %d changes: %s", i, seen, fault)
			}
		}
		if differ == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %d changes: %s", seen, differ)
		}
		time.Sleep(time.Millisecond) // between two looks at the condition
	}
	readers[0].ledger.rest()
	for _, rd := range readers {
		rd.mu.Lock()
		rd.quiet = false
		rd.mu.Unlock()
	}
}

// writer changes the registry at random.
type writer struct {
	t       *testing.T
	r       *rand.Rand
	p       *pipeline
	ledger  *ledger
	next    map[string]uint64 // generations, of the living and the dead
	refused int
}

func (w *writer) change() {
	w.t.Helper()
	l := w.ledger
	uids := slices.Sorted(maps.Keys(l.records)) // only the writer changes it
	switch n := w.r.IntN(20); {
	case len(uids) == 0 || n < 4 && len(uids) < 24:
		uid := fmt.Sprint("pod", w.r.IntN(60)) // some are re-created, with a newer generation
		if _, lives := l.records[uid]; !lives {
			w.put(w.random(uid))
		}
	case n < 7:
		uid := uids[w.r.IntN(len(uids))]
		l.change(uid, nil)
		must(w.t, w.p.backend.Withdraw(context.Background(), uid, l.recordsGeneration(uid, w.next)))
	case n == 7: // what comes too late changes nothing
		old := l.records[uids[w.r.IntN(len(uids))]]
		old.Default = 7777
		old.Ports = []model.PortStatus{{Port: port.Port{Number: 7777, Protocol: port.HTTP}, Health: model.Healthy}}
		old.Generation--
		w.stale(w.p.backend.Publish(context.Background(), old))
		w.stale(w.p.backend.Withdraw(context.Background(), old.UID, old.Generation))
	default:
		ep := w.random(uids[w.r.IntN(len(uids))])
		old := l.records[ep.UID]
		ep.Service, ep.Identity, ep.Since = old.Service, old.Identity, old.Since
		if w.r.IntN(8) != 0 {
			ep.Addresses = old.Addresses
		}
		switch w.r.IntN(3) {
		case 0: // health alone
			ep.Default, ep.Weight, ep.Ports = old.Default, old.Weight, slices.Clone(old.Ports)
			for i := range ep.Ports {
				ep.Ports[i].Health = w.health()
			}
		case 1: // weight alone
			ep.Default, ep.Ports = old.Default, old.Ports
		}
		w.put(ep)
	}
}

func (w *writer) stale(err error) {
	w.t.Helper()
	if !errors.Is(err, registry.ErrStale) {
		w.t.Fatalf("a change that came too late: %v", err)
	}
	w.refused++
}

func (l *ledger) recordsGeneration(uid string, next map[string]uint64) uint64 {
	next[uid]++
	return next[uid]
}

func (w *writer) put(ep model.Endpoint) {
	w.t.Helper()
	ep.Generation = w.ledger.recordsGeneration(ep.UID, w.next)
	w.ledger.change(ep.UID, &ep)
	must(w.t, w.p.backend.Publish(context.Background(), ep))
}

func (w *writer) health() model.Health {
	return []model.Health{model.Healthy, model.Healthy, model.Healthy, model.Unhealthy, model.Draining}[w.r.IntN(5)]
}

// random is some pod, added now. Addresses are few, so that pods get each other's.
func (w *writer) random(uid string) model.Endpoint {
	services := []string{"default/x", "shop/x", "default/y", "default/y", "shop/z"}
	ns, name, _ := strings.Cut(services[w.r.IntN(len(services))], "/")
	ep := model.Endpoint{
		UID: uid, Since: time.Unix(1_700_000_000+int64(w.ledger.changes), 0),
		Service:   model.ServiceKey{Namespace: ns, Name: name},
		Identity:  model.Identity{TrustDomain: domain, Namespace: ns, Account: name},
		Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + w.r.IntN(40))})},
		Weight:    uint32(1 + w.r.IntN(4)),
	}
	for _, number := range []uint16{5432, 7000, 8080, 9090} {
		if w.r.IntN(2) == 0 {
			continue
		}
		protocol := []port.Protocol{port.HTTP, port.HTTP, port.H2, port.TCP}[w.r.IntN(4)]
		ep.Ports = append(ep.Ports, model.PortStatus{Port: port.Port{Number: number, Protocol: protocol}, Health: w.health()})
	}
	if len(ep.Ports) > 0 {
		ep.Default = ep.Ports[w.r.IntN(len(ep.Ports))].Number
	}
	return ep
}

// A client that shares no code with the server sees exactly the sets of the contract
// through 10,000 random changes of the registry, over real gRPC on a real socket: at
// every rest the sets of all its names are right to the weight, and no response names
// an endpoint that did not serve that port at the time, whenever names are asked for
// and given up, and whatever is rejected, withheld or resumed (I1, I9, XDS-18, XDS-36,
// XDS-41, XDS-46, XDS-47).
func TestIndependentReader(t *testing.T) {
	const seed = 1
	l := newLedger()
	p := startPipeline(t, setting{path: filepath.Join(t.TempDir(), "state.db"), unknownCap: 1000, names: &told{}, log: silent()})
	defer p.close(t)
	must(t, p.publisher.AwaitSynced(t.Context()))
	p.cache.Release()
	path := filepath.Join(t.TempDir(), "xds", "xds.sock")
	serve(t, p, path)

	var names []string
	for _, host := range []string{"x", "x.default", "x.shop", "y", "y.default", "z", "z.shop", "ghost"} {
		names = append(names, host+"."+domain)
		for _, number := range []string{"5432", "7000", "8080", "9090", "7777"} {
			names = append(names, host+"."+domain+":"+number)
		}
	}
	var readers []*reader
	for i := range 5 {
		rd := &reader{
			t: t, ledger: l, path: path, asked: map[string]bool{}, only: map[string]bool{}, moody: i != flagship,
			node:    &corev3.Node{Id: fmt.Sprint("reader", i), UserAgentName: "reader"},
			decoded: &decoded{clusters: map[string]wireCluster{}, assignments: map[string]set{}},
			r:       rand.New(rand.NewPCG(seed, uint64(i))), judges: rand.New(rand.NewPCG(seed, uint64(100+i))),
		}
		if i == flagship {
			rd.node.UserAgentName = "envoy"
		}
		rd.open(nil, nil)
		defer func() { rd.close() }()
		readers = append(readers, rd)
	}
	envoy := readers[flagship]
	must(t, envoy.ads.Subscribe(resource.ClusterType, "*"))
	must(t, envoy.ads.Subscribe(resource.ListenerType, "*"))
	must(t, envoy.ads.Subscribe(resource.RouteType, "routes|http"))

	w := &writer{t: t, r: rand.New(rand.NewPCG(seed, 50)), p: p, ledger: l, next: map[string]uint64{}}
	rests := 0
	for at := 0; at < readerChanges; {
		for range 1 + w.r.IntN(100) {
			w.change()
			at++
			if w.r.IntN(3) == 0 {
				readers[w.r.IntN(len(readers))].act(names)
			}
		}
		await(t, readers, at)
		rests++
	}
	full := 0
	for _, rd := range readers {
		full += len(look(rd.od, resource.ClusterType).resources)
	}
	if rests < 100 || full < 50 || w.refused < 500 {
		t.Errorf("%d rests, %d clusters held at the end, %d late changes refused: the test has lost its point", rests, full, w.refused)
	}
}

// serve serves the pipeline's cache on a unix socket until the test ends.
func serve(t *testing.T, p *pipeline, path string) {
	t.Helper()
	srv, err := server.New(server.Config{Cache: p.cache})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	lis, err := unixsocket.Listen(ctx, unixsocket.Config{Path: path, UID: unixsocket.Keep, GID: unixsocket.Keep})
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ctx, lis) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
