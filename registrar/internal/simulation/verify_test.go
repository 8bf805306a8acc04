package simulation

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	resourcev3 "github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/publisher"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// verifyStep holds what is true at every moment.
func (w *world) verifyStep() {
	w.mu.Lock()
	for _, c := range w.containers {
		if c.spooled {
			_, err := os.Stat(filepath.Join(w.spoolDir(), c.key.String()+"."+string(spool.Deleted)+".json"))
			c.spooled = err == nil
		}
		if c.gone && !c.spooled {
			continue
		}
		w.mayBeDefault(c.service, c.profile.def)
		for _, p := range slices.Concat(c.profile.served(), c.former.served()) {
			if c.proven && c.told.Inbound && slices.Contains(c.told.Listening, p.Number) {
				w.served[place{c.service, p.Number, p.Protocol.Class(), c.addr}] = w.step
			}
		}
	}
	from := w.step - 1
	if w.hung != 0 {
		from = min(from, w.hung-1)
	}
	select {
	case <-w.disk:
		w.hung = 0
	default:
	}
	answers := w.reg != nil && w.reg.ready && !w.unsigned
	arrivals := w.arrivals
	w.arrivals = nil
	w.mu.Unlock()
	for _, a := range arrivals {
		w.verifyArrival(a, from)
	}
	for _, e := range w.envoys {
		e.mu.Lock()
		if e.changed || !e.behind.IsZero() {
			e.changed = false
			if !e.isBehind() {
				w.verifyRequests(e)
			}
			w.verifyReferences(e)
		}
		w.verifySecrets(e, answers)
		e.mu.Unlock()
	}
	if w.reg != nil && w.reg.publisher.Asked() > unknownCap {
		w.fail("%d names that lead nowhere are remembered (I9)", w.reg.publisher.Asked())
	}
}

// mayBeDefault notes a port that a portless name may have from now on. The caller
// holds mu.
func (w *world) mayBeDefault(key model.ServiceKey, number uint16) {
	if w.portless[key] == nil {
		w.portless[key] = map[uint16]bool{}
	}
	w.portless[key][number] = true
}

// port is what a cluster of HTTP or TCP leads to, by its SNI.
func (c wireCluster) port() (number uint16, class port.Class) {
	text, rest, tcp := strings.Cut(c.sni, ".")
	n, err := strconv.ParseUint(text, 10, 16)
	switch {
	case err != nil || tcp && rest != c.service.Name+"."+c.service.Namespace:
		return 0, port.ClassNone
	case tcp:
		return uint16(n), port.ClassTCP
	}
	return uint16(n), port.ClassHTTP
}

// verifyArrival holds I1 for a load assignment: every endpoint serves the port now, or
// did when it was sent.
func (w *world) verifyArrival(a arrival, from int) {
	if a.behind {
		return
	}
	number, class := a.cluster.port()
	for addr := range a.endpoints {
		at, ever := w.served[place{a.cluster.service, number, class, addr}]
		if !ever || at < from {
			w.fail("%s gets %s for %s, port %d of %s, which it served in step %d last (I1)", a.envoy, addr, a.name, number, a.cluster.service, at)
		}
	}
}

// verifyRequests holds I1 for every request that a client could make now.
func (w *world) verifyRequests(e *envoy) {
	for _, a := range authorities() {
		name, ok := e.route(a)
		c := e.active[name]
		if !ok || c == nil || !c.eds {
			continue
		}
		host, number, explicit := strings.Cut(a, ":")
		if explicit && c.sni != number {
			w.fail("%s: %s leads to %s, which means port %s of %s (I1)", e.name, a, name, c.sni, c.service)
		}
		labels := strings.Split(strings.TrimSuffix(host, "."+domain), ".")
		if c.service.Name != labels[0] || len(labels) == 2 && c.service.Namespace != labels[1] {
			w.fail("%s: %s leads to %s, which is of %s (I1)", e.name, a, name, c.service)
		}
		if p, _ := c.port(); !explicit && !w.portless[c.service][p] {
			w.fail("%s: %s leads to port %d, which was no default lately (I1)", e.name, a, p)
		}
	}
	for name, c := range e.active {
		dest, err := netip.ParseAddrPort(name)
		if err != nil || !c.eds {
			continue
		}
		if number, class := c.port(); class != port.ClassTCP || number != dest.Port() {
			w.fail("%s: TCP to %s has SNI %s (I1)", e.name, name, c.sni)
		}
		if owner, known := w.vips[dest.Addr().String()]; known && owner != c.service {
			w.fail("%s: TCP to %s leads to %s, the address is %s's (I1)", e.name, name, c.service, owner)
		}
		w.vips[dest.Addr().String()] = c.service
	}
}

// verifyReferences holds I6 for what an Envoy has: no listener is there before its
// clusters, or after them (XDS-R14).
func (w *world) verifyReferences(e *envoy) {
	if !e.orderly {
		return
	}
	for name, l := range e.listeners {
		for _, app := range l.apps {
			if e.active[app] == nil && !e.late[name] {
				w.fail("%s has listener %s without cluster %s (I6)", e.name, name, app)
			}
		}
	}
}

// verifySecrets holds that listeners and clusters get the secrets that they name: they open
// no port, or have no certificate, before. answers: the registrar is there, and so is the signer.
func (w *world) verifySecrets(e *envoy, answers bool) {
	lacking := map[string]time.Time{}
	for user, s := range e.users() {
		if e.secrets[s] {
			continue
		}
		since, ok := e.lacking[s]
		if !ok || !answers || !e.connected || e.rejected || e.silent[cache.Secret] || e.isLate() {
			since = time.Now()
		}
		lacking[s] = since
		if time.Since(since) > catchUp {
			w.fail("%s has had %s without secret %s for %s (I6)", e.name, user, s, time.Since(since))
		}
	}
	e.lacking = lacking
}

// records are what the registry has to have, by the containers.
func (w *world) records() contract {
	out := contract{records: map[string]model.Endpoint{}}
	for _, c := range w.list(func(c *container) bool { return c.attached && !c.gone && c.lives }) {
		table := w.read(c.key)
		ep := model.Endpoint{UID: c.key.String(), Service: c.service, Addresses: []netip.Addr{c.addr}, Default: c.profile.def, Weight: 1}
		for _, p := range c.profile.served() {
			s := model.PortStatus{Port: p}
			if table.Inbound && slices.Contains(table.Listening, p.Number) {
				s.Health = model.Healthy
			}
			ep.Ports = append(ep.Ports, s)
		}
		if len(ep.Ports) > 0 {
			out.records[ep.UID] = ep
		}
	}
	return out
}

// rest lets everything arrive and holds what must be true then.
func (w *world) rest() {
	w.t.Helper()
	w.log("rest")
	w.mu.Lock()
	w.unsigned = false
	w.mu.Unlock()
	w.setMoody(false)
	w.setDisk(true)
	for range 12 {
		w.calm(3 * time.Second)
		for _, c := range w.list(func(c *container) bool { return !c.lives && !c.gone && c.busy == 0 }) {
			w.del(c)
		}
	}
	r := w.reg
	r.working.Go(func() { r.pods.Sweep(r.ctx) }) // takes the DELs that could not be delivered
	w.calm(10 * time.Second)
	w.calm(10 * time.Second)
	if len(w.calls) > 0 {
		w.fail("%d CNI calls have not returned at rest", len(w.calls))
	}
	w.verifyRest()
	w.setMoody(true)
	w.mu.Lock()
	w.portless = map[model.ServiceKey]map[uint16]bool{}
	for _, v := range w.reg.publisher.Services() {
		w.mayBeDefault(v.Service, v.Committed)
	}
	w.mu.Unlock()
	w.settle()
}

func (w *world) setMoody(moody bool) {
	for _, e := range w.envoys {
		e.mu.Lock()
		e.moody = moody
		e.mu.Unlock()
	}
}

// calm lets time pass while everybody does what is asked.
func (w *world) calm(d time.Duration) {
	w.t.Helper()
	w.next()
	for _, e := range w.envoys {
		if e.isStuck() {
			e.disconnect()
		}
		if !e.connected {
			e.connect(false)
		}
		for _, kind := range cache.Kinds() {
			e.answer(kind)
		}
	}
	for _, c := range w.list(func(*container) bool { return true }) {
		w.reg.outside.tell(c.key)
	}
	time.Sleep(d)
	w.settle()
}

// verifyRest holds what is true at rest.
func (w *world) verifyRest() {
	w.t.Helper()
	records := w.records()
	k := known{}
	names := map[string]bool{}
	for _, v := range w.reg.publisher.Services() {
		k[v.Service] = true
		if v.Step != projection.Settled {
			w.fail("%s does not come to rest: %s awaits %v", v.Service, v.Step, v.Await)
		}
		for _, s := range v.Spellings {
			names[s] = true
		}
	}
	var stored []string
	for _, ep := range w.reg.backend.Snapshot() {
		stored = append(stored, ep.UID)
		if !k[ep.Service] {
			w.fail("%s has a record and is not known", ep.Service)
		}
	}
	w.same("records", slices.Sorted(maps.Keys(records.records)), stored)
	w.same("names told to DNS", slices.Sorted(maps.Keys(names)), slices.Sorted(maps.Keys(w.dns.get())))
	w.verifyUses()
	for _, e := range w.envoys {
		e.mu.Lock()
		w.verifyLocal(e)
		w.verifyReach(e, records, k)
		w.verifyStray(e, records, k)
		e.mu.Unlock()
	}
	w.verifyOrder()
	w.verifyBytes()
}

// settled returns the known services, and whether none is in the middle of a change.
func settled(p *publisher.Publisher) (known []model.ServiceKey, ok bool) {
	ok = true
	for _, v := range p.Services() {
		known = append(known, v.Service)
		ok = ok && v.Step == projection.Settled
	}
	return known, ok
}

// same fails if two sorted lists differ.
func (w *world) same(what string, want, got []string) {
	if len(want)+len(got) == 0 {
		return
	}
	if d := cmp.Diff(want, got); d != "" {
		w.fail("%s at rest (-want +got):\n%s", what, d)
	}
}

// verifyUses holds that every identity is counted once for each pod that has it.
func (w *world) verifyUses() {
	want := map[model.Identity]int{}
	for _, c := range w.list(func(c *container) bool { return c.attached && !c.gone && c.lives }) {
		want[model.Identity{TrustDomain: domain, Namespace: c.service.Namespace, Account: c.service.Name}]++
	}
	w.reg.outside.identities.Lock()
	defer w.reg.outside.identities.Unlock()
	if !maps.Equal(want, w.reg.outside.uses) {
		w.fail("identities are used %v, want %v", w.reg.outside.uses, want)
	}
}

// verifyLocal holds that an Envoy has the listeners and app clusters of the attached
// pods and no others, and everything that they refer to (I6).
func (w *world) verifyLocal(e *envoy) {
	var listeners, apps []string
	holders := map[string]string{}
	for _, c := range w.list(func(c *container) bool { return c.attached && !c.gone && c.lives }) {
		id := c.key.String()
		listeners = append(listeners, resource.OutboundHTTPListener(id), resource.OutboundTCPListener(id))
		for i, p := range c.profile.served() {
			if i == 0 {
				listeners = append(listeners, resource.InboundListener(id))
			}
			apps = append(apps, resource.AppClusterName(id, p.Number))
		}
		identity := model.Identity{TrustDomain: domain, Namespace: c.service.Namespace, Account: c.service.Name}
		holders[resource.CertificateClusterName(identity)] = resource.OutboundSecret(identity)
	}
	slices.Sort(listeners)
	slices.Sort(apps)
	w.same(e.name+"'s listeners", listeners, slices.Sorted(maps.Keys(e.listeners)))
	held := slices.DeleteFunc(slices.Sorted(maps.Keys(e.active)), func(n string) bool { return !strings.HasPrefix(n, "app|") })
	w.same(e.name+"'s app clusters", apps, held)
	if d := cmp.Diff(holders, e.holders); d != "" {
		w.fail("%s holds for outbound connections at rest (-want +got):\n%s", e.name, d)
	}
	for user, s := range e.users() {
		if !e.secrets[s] {
			w.fail("%s has %s without secret %s (I6)", e.name, user, s)
		}
	}
	if len(e.warming) > 0 {
		w.fail("%s has clusters that still warm: %v", e.name, slices.Sorted(maps.Keys(e.warming)))
	}
}

// verifyReach holds that every request reaches exactly the set of the contract (I1), as
// far as Envoy asked for its cluster, and that it got what it asked for (I6).
func (w *world) verifyReach(e *envoy, records contract, k known) {
	for _, a := range authorities() {
		want, number := records.reached(k, a)
		name, ok := e.route(a)
		c := e.active[name]
		switch {
		case !ok && len(e.routes.domains) > 0 && len(want) > 0:
			w.fail("%s refuses %s, which %v serve", e.name, a, want)
		case !ok, c == nil && !e.asked[name]:
		case c == nil:
			if len(want) > 0 {
				w.fail("%s asked for %s and does not have it; %v serve %s", e.name, name, want, a)
			}
		case !maps.Equal(c.endpoints, want):
			w.fail("%s: %s reaches %v by %s, want %v", e.name, a, c.endpoints, name, want)
		case len(want) > 0 && c.sni != strconv.Itoa(int(number)):
			w.fail("%s: %s has SNI %s, want %d", e.name, a, c.sni, number)
		}
	}
	var tombstones []string
	for name, c := range e.active {
		dest, err := netip.ParseAddrPort(name)
		if err == nil && c.eds {
			if want := serving(records.of(c.service), dest.Port(), port.ClassTCP); !maps.Equal(c.endpoints, want) {
				w.fail("%s: TCP to %s of %s reaches %v, want %v", e.name, name, c.service, c.endpoints, want)
			}
		}
		if !c.eds && c.source == cache.OnDemand {
			tombstones = append(tombstones, name)
		}
	}
	if len(tombstones) > unknownCap {
		slices.Sort(tombstones)
		w.fail("%s has %d tombstones, %d are allowed (I9): %v", e.name, len(tombstones), unknownCap, tombstones)
	}
}

// verifyStray holds I2: no cluster has the name of a default port, but for one that was
// asked for before its service could be routed.
func (w *world) verifyStray(e *envoy, records contract, k known) {
	for key := range k {
		eps := records.of(key)
		def := defaultPort(eps)
		if def == 0 || classOf(eps, def) != port.ClassHTTP {
			continue
		}
		long := key.Name + "." + key.Namespace + "." + domain
		spellings := []string{long}
		if owner, _, ok := k.named(key.Name + "." + domain); ok && owner == key {
			spellings = append(spellings, key.Name+"."+domain)
		}
		for _, s := range spellings {
			stray := s + ":" + strconv.Itoa(int(def))
			if c := e.active[stray]; c != nil && c.eds && !w.excused[stray] {
				w.fail("%s has a cluster %s at rest (I2)", e.name, stray)
			}
		}
	}
}

// verifyOrder holds I5: a registrar that starts from what is saved, and is told the same
// records in another order, gives the bytes that Envoy has.
func (w *world) verifyOrder() {
	w.t.Helper()
	w.settle()
	path := filepath.Join(w.dir, "again", "state.db")
	must(w.t, os.MkdirAll(filepath.Dir(path), 0o700))
	text, err := os.ReadFile(w.reg.path)
	must(w.t, err)
	must(w.t, os.WriteFile(path, text, 0o600))
	eps := w.reg.backend.Snapshot()
	r := rand.New(rand.NewPCG(uint64(w.step), 5))
	r.Shuffle(len(eps), func(i, j int) { eps[i], eps[j] = eps[j], eps[i] })
	again := startPipeline(w.t, setting{path: path, unknownCap: unknownCap, names: &told{}, log: silent(), feed: tell(eps)})
	defer func() {
		again.close(w.t)
		must(w.t, os.RemoveAll(filepath.Dir(path)))
	}()
	time.Sleep(tick)
	synctest.Wait()
	again.cache.Release()
	e := w.envoys[0]
	asked := w.reg.cache.Demanded(cache.OnDemandCluster) // all, as their number matters (I9)
	clusters, _ := e.meshClusters()
	held := slices.Sorted(maps.Keys(clusters))
	asked = slices.Compact(slices.Sorted(slices.Values(slices.Concat(asked, held))))
	ads, od, cut := w.look(again.cache, "again")
	defer cut()
	if len(asked) > 0 {
		must(w.t, od.Subscribe(resourcev3.ClusterType, asked...))
		must(w.t, ads.Subscribe(resourcev3.EndpointType, asked...))
	}
	// Time goes on, and a service may be forgotten, in steps, by one of them up to a minute
	// later than by the other: both come to rest again.
	w.calm(5 * time.Second)
	for range 15 {
		mine, ok := settled(w.reg.publisher)
		others, too := settled(again.publisher)
		if ok && too && slices.Equal(mine, others) {
			break
		}
		w.calm(5 * time.Second)
	}
	// Who asks first decides then what is refused. What one of them gave unasked it may
	// have without a place among the remembered names.
	capped := max(w.reg.publisher.Asked(), again.publisher.Asked()) >= unknownCap
	versions := func(cluster func(name string) string, eds map[string]xdstest.Resource) (out []string) {
		for _, name := range held {
			out = append(out, fmt.Sprintf("%s cluster %s endpoints %s", name, cluster(name), eds[name].Version))
		}
		return out
	}
	answered := look(od, resourcev3.ClusterType).resources
	if capped {
		held = slices.DeleteFunc(held, func(name string) bool { _, ok := answered[name]; return !ok })
	}
	// Time went on meanwhile, and with it names that were kept for a while.
	clusters, table := e.meshClusters()
	held = slices.DeleteFunc(held, func(name string) bool { return clusters[name] == "" })
	w.same("bytes of a registrar that was told in another order", versions(func(name string) string { return clusters[name] },
		look(e.streams[cache.ADS], resourcev3.EndpointType).resources),
		versions(func(name string) string { return answered[name].Version }, look(ads, resourcev3.EndpointType).resources))
	given := look(ads, resourcev3.RouteType).resources[resource.RoutesName]
	routes, err := w.routesOf(&discoveryv3.Resource{Version: given.Version, Resource: given.Body})
	must(w.t, err)
	// How many unknown names Envoys asked for is not in the records (I9).
	if table.domains != nil && (routes.capped == table.capped && routes.version != table.version || !maps.Equal(routes.domains, table.domains)) {
		w.fail("routes of a registrar that was told in another order: %v, want %v (I5)", routes, table)
	}
}

// verifyBytes holds I5 for registrars that start from nothing: whatever order they are told
// the records in, they give the same bytes. There are two pods for each that is there, with
// all their ports healthy, so that sets have several endpoints.
func (w *world) verifyBytes() {
	w.t.Helper()
	var eps []model.Endpoint
	for _, ep := range w.reg.backend.Snapshot() {
		ep.Ports = slices.Clone(ep.Ports)
		for i := range ep.Ports {
			ep.Ports[i].Health = model.Healthy
		}
		twin := ep
		twin.UID += "-twin"
		octets := ep.Addresses[0].As4()
		octets[2]++
		twin.Addresses = []netip.Addr{netip.AddrFrom4(octets)}
		eps = append(eps, ep, twin)
	}
	slices.SortFunc(eps, func(a, b model.Endpoint) int { return strings.Compare(a.UID, b.UID) })
	want := w.bytesOf(eps)
	r := rand.New(rand.NewPCG(uint64(w.step), 6))
	r.Shuffle(len(eps), func(i, j int) { eps[i], eps[j] = eps[j], eps[i] })
	w.same("bytes of a registrar that starts from records in another order (I5)", want, w.bytesOf(eps))
}

// look opens the streams of an Envoy that asks for clusters and routes; cut ends them.
func (w *world) look(c *cache.Cache, name string) (ads, od *xdstest.Client, cut func()) {
	w.t.Helper()
	ads, cutADS := dial(c, cache.ADS, name, nil)
	od, cutOD := dial(c, cache.OnDemand, name, nil)
	must(w.t, ads.Subscribe(resourcev3.ClusterType))
	must(w.t, ads.Subscribe(resourcev3.RouteType, resource.RoutesName))
	return ads, od, func() {
		cutADS()
		cutOD()
		<-ads.Done()
		<-od.Done()
	}
}

// bytesOf returns the versions of everything that a registrar with these records and
// nothing saved gives an Envoy that asks for every cluster.
func (w *world) bytesOf(eps []model.Endpoint) []string {
	w.t.Helper()
	path := filepath.Join(w.dir, "fresh", "state.db")
	must(w.t, os.MkdirAll(filepath.Dir(path), 0o700))
	p := startPipeline(w.t, setting{path: path, unknownCap: unknownCap, names: &told{}, log: silent(), feed: tell(eps)})
	defer func() {
		p.close(w.t)
		must(w.t, os.RemoveAll(filepath.Dir(path)))
	}()
	p.cache.Release()
	ads, od, cut := w.look(p.cache, "fresh")
	defer cut()
	var names []string
	for _, v := range p.publisher.Services() {
		for _, c := range v.Clusters {
			names = append(names, c.Name)
		}
	}
	if len(names) > 0 {
		must(w.t, od.Subscribe(resourcev3.ClusterType, names...))
		must(w.t, ads.Subscribe(resourcev3.EndpointType, names...))
	}
	time.Sleep(catchUp)
	synctest.Wait()
	var out []string
	for typeURL, stream := range map[string]*xdstest.Client{
		resourcev3.RouteType: ads, resourcev3.EndpointType: ads, resourcev3.ClusterType: od,
	} {
		for name, r := range look(stream, typeURL).resources {
			out = append(out, typeURL+" "+name+" "+r.Version)
		}
	}
	slices.Sort(out)
	return out
}

// tell returns a feed of records, in their order, that are all there are.
func tell(eps []model.Endpoint) func(sink func(registry.Event)) {
	return func(sink func(registry.Event)) {
		for _, ep := range eps {
			sink(registry.Event{Kind: registry.Upsert, Endpoint: ep, UID: ep.UID, Generation: ep.Generation})
		}
		sink(registry.Event{Kind: registry.Complete})
	}
}
