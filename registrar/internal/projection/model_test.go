package projection

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

var (
	modelSteps = flag.Int("model.steps", 100_000, "steps of the model test")
	modelSeed  = flag.Uint64("model.seed", 1, "seed of the model test")
)

// world is the model test: an Engine, a publisher and an Envoy, with the pods of a small
// mesh coming, changing and going.
type world struct {
	t     *testing.T
	r     *rand.Rand
	cfg   Config
	now   time.Time
	disk  store
	e     *Engine
	envoy *simEnvoy
	pub   *simPublisher
	pods  map[string]model.Endpoint
	uids  int
	// portless are the ports that a portless name may have, since the last rest.
	portless map[string]map[string]bool
	trace    []string
}

// authorities are the names that clients send: every spelling of every service, without
// port and with every port.
func authorities() []string {
	var out []string
	for _, host := range []string{"x", "y", "x.default", "x.shop", "x.ops", "y.default", "ghost"} {
		out = append(out, host+"."+domain)
		for _, p := range []string{"5432", "7000", "8080", "9090"} {
			out = append(out, host+"."+domain+":"+p)
		}
	}
	return out
}

// randomServer returns a pod of the model's world.
func (w *world) randomServer(uid string) model.Endpoint {
	services := []string{"default/x", "shop/x", "shop/x", "ops/x", "default/y", "default/y", "default/y"}
	profiles := []string{
		"8080*+", "8080*+ 9090+", "8080+ 9090*+", "8080+ 9090*+", "7000*+ 8080+ 9090+", "5432=tcp*+ 8080+ 9090+",
		"5432=tcp+ 8080*+", "8080*- 9090=h2+", "9090*-", "8080=h2*~", "5432*+ 8080+", "",
	}
	p := pod(uid, services[w.r.IntN(len(services))], fmt.Sprintf("10.0.0.%d", 1+w.r.IntN(8)), profiles[w.r.IntN(len(profiles))])
	p.Since = w.now
	p.Identity.Account = fmt.Sprint("account", w.r.IntN(2))
	return p
}

// act does one random thing.
func (w *world) act() {
	switch n := w.r.IntN(1000); {
	case n < 60:
		w.changePods()
	case n < 75:
		w.now = w.now.Add(time.Duration(w.r.IntN(8)) * time.Minute)
		w.e.Expire(w.now)
	case n < 200:
		w.pub.flush()
		w.noteCommitted()
	case n < 320:
		w.pub.stepRDS()
	case n < 440:
		w.pub.stepCDS()
	case n < 560:
		w.pub.stepEDS()
	case n < 600:
		w.timeout()
	case n < 800:
		w.request()
	case n < 990:
		if w.pub.advance() {
			w.noteCommitted()
		}
	case n < 993:
		early := w.pub.early
		if w.r.IntN(2) == 0 {
			w.log("a fresh Envoy")
			w.envoy, early = newSimEnvoy(), map[string]bool{}
		} else {
			w.log("Envoy connects again")
		}
		for name := range w.pub.demanded {
			w.e.Forget(name)
		}
		w.pub.flush()
		w.noteCommitted()
		w.pub.connect(w.envoy)
		maps.Copy(w.pub.early, early)
	case n < 995:
		w.restart()
	case n < 998:
		w.rest()
	}
	w.checkRequests()
}

func (w *world) log(format string, args ...any) {
	w.trace = append(w.trace, fmt.Sprintf(format, args...))
	if len(w.trace) > 80 {
		w.trace = w.trace[1:]
	}
}

func (w *world) fatal(format string, args ...any) {
	w.t.Helper()
	for _, line := range w.trace {
		w.t.Log(line)
	}
	w.t.Fatalf(format, args...)
}

func (w *world) changePods() {
	uids := slices.Sorted(maps.Keys(w.pods))
	var p model.Endpoint
	switch n := w.r.IntN(10); {
	case len(uids) == 0 || n < 2 && len(uids) < 7:
		w.uids++
		p = w.randomServer(fmt.Sprint("pod", w.uids))
	case n < 4:
		uid := uids[w.r.IntN(len(uids))]
		w.log("delete %s", uid)
		w.e.Delete(uid, w.pods[uid].Generation, w.now)
		delete(w.pods, uid)
		return
	default:
		old := w.pods[uids[w.r.IntN(len(uids))]]
		p = w.randomServer(old.UID)
		p.Service, p.Addresses, p.Identity, p.Generation = old.Service, old.Addresses, old.Identity, old.Generation+1
	}
	w.log("pod %s of %s at %s: %v default %d", p.UID, p.Service, p.Addresses[0], p.Ports, p.Default)
	w.pods[p.UID] = p
	if err := w.e.Upsert(p, w.now); err != nil {
		w.fatal("%v", err)
	}
}

// timeout ends the warming of a cluster whose load assignment is late: it takes the one
// that Envoy has cached.
func (w *world) timeout() {
	names := slices.Sorted(maps.Keys(w.envoy.warming))
	if len(names) == 0 {
		return
	}
	var endpoints []ClusterEndpoint
	if old := w.envoy.active[names[0]]; old != nil {
		endpoints = old.endpoints
	}
	w.envoy.promote(names[0], endpoints)
}

// request is a client's: if it leads to a cluster that Envoy does not have and never
// asked for, Envoy asks.
func (w *world) request() {
	names := authorities()
	name, ok := w.envoy.route(names[w.r.IntN(len(names))])
	if w.r.IntN(10) == 0 {
		if v, known := w.e.Shape(key("default/y")); known && len(v.TCPPorts) > 0 {
			name, ok = netip.AddrPortFrom(v.VIP4, v.TCPPorts[0]).String(), true
		}
	}
	if !ok || w.envoy.asked[name] {
		return
	}
	w.log("Envoy asks for %s", name)
	w.envoy.asked[name] = true
	w.e.settle()
	if w.e.find(name).reach == alias {
		w.pub.early[name] = true
	}
	w.pub.demand(name)
	w.noteCommitted()
}

// restart is a new registrar beside the old Envoy: it has what was saved, reads the
// registry, and meets an Envoy that knows all the names it ever asked for.
func (w *world) restart() {
	w.log("the registrar restarts")
	e, err := New(w.cfg, w.disk.entries(), w.now)
	if err != nil {
		w.fatal("%v", err)
	}
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		p := w.pods[uid]
		if err := e.Upsert(p, w.now); err != nil {
			w.fatal("%v", err)
		}
	}
	e.Synced()
	w.e = e
	early := w.pub.early
	w.pub = newSimPublisher(e, w.envoy, w.disk, w.log)
	w.pub.early = early
	w.pub.flush()
	w.noteCommitted()
}

// noteCommitted keeps what a portless name may mean between two rests.
func (w *world) noteCommitted() {
	for k := range w.e.Services() {
		v, _ := w.e.Shape(k)
		for _, s := range append(v.Spellings, v.Name) {
			if w.portless[s] == nil {
				w.portless[s] = map[string]bool{}
			}
			w.portless[s][strconv.Itoa(int(v.Committed))] = true
		}
	}
}

// checkRequests holds I1 for every request that a client could make now: an explicit
// port leads to a cluster of that port or fails; a long name never leads to another
// service; a flat name leads to a service so called; a portless name has a port that
// was the default since the last rest.
func (w *world) checkRequests() {
	for _, a := range authorities() {
		name, ok := w.envoy.route(a)
		c := w.envoy.active[name]
		if !ok || c == nil || c.tombstone {
			continue
		}
		host, number, explicit := strings.Cut(a, ":")
		if explicit && c.sni != number {
			w.fatal("%s leads to %s, which means port %s of %s", a, name, c.sni, c.id.Service)
		}
		labels := strings.Split(strings.TrimSuffix(host, "."+domain), ".")
		if c.id.Service.Name != labels[0] || len(labels) == 2 && c.id.Service.Namespace != labels[1] {
			w.fatal("%s leads to %s, which is of %s", a, name, c.id.Service)
		}
		if !explicit && !w.portless[host][c.sni] {
			w.fatal("%s leads to port %s, which was no default lately: %v", a, c.sni, w.portless[host])
		}
	}
	for name, c := range w.envoy.active {
		if dest, err := netip.ParseAddrPort(name); err == nil && !c.tombstone {
			if sni := fmt.Sprintf("%d.%s.%s", dest.Port(), c.id.Service.Name, c.id.Service.Namespace); c.sni != sni {
				w.fatal("TCP to %s has SNI %s", name, c.sni)
			}
		}
	}
}

// rest lets everything arrive and holds what must be true then.
func (w *world) rest() {
	w.log("rest")
	for range 10_000 {
		w.pub.flush()
		w.noteCommitted()
		if !w.pub.advance() && !w.pub.stepRDS() && !w.pub.stepCDS() && !w.pub.stepEDS() {
			break
		}
		w.checkRequests()
	}
	w.portless = map[string]map[string]bool{}
	w.noteCommitted()
	for k := range w.e.Services() {
		w.checkService(k)
	}
	w.checkHeld()
	if n := w.e.Asked(); n > w.cfg.UnknownCap {
		w.fatal("%d names are remembered", n)
	}
}

// checkService holds the rules for one service at rest, seen from Envoy.
func (w *world) checkService(k model.ServiceKey) {
	v, _ := w.e.View(k)
	if v.Step != Settled {
		w.fatal("%s does not come to rest: %s awaits %v", k, v.Step, v.Await)
	}
	for _, h := range v.VirtualHosts {
		for _, d := range h.Domains {
			if got := w.envoy.routes[d]; got != h.Cluster {
				w.fatal("%s is routed to %q, the View says %q", d, got, h.Cluster)
			}
		}
	}
	if want := w.e.services[k].wanted().Number; v.Committed != want {
		w.fatal("%s rests with default port %d, wanted is %d", k, v.Committed, want)
	}
	// I2: no cluster of the default port's own name, but for names asked for too early.
	for _, s := range v.Spellings {
		stray := s + ":" + strconv.Itoa(int(v.Default))
		if c := w.envoy.active[stray]; c != nil && !c.tombstone && !w.pub.early[stray] {
			w.fatal("at rest there is a cluster %s", stray)
		}
	}
}

// checkHeld compares every cluster that Envoy holds with what the Engine says, and its
// endpoints with the pods.
func (w *world) checkHeld() {
	for _, name := range slices.Sorted(maps.Keys(w.envoy.asked)) {
		held := w.envoy.active[name]
		want, ok := w.e.Cluster(name)
		if !ok {
			if held != nil && !held.tombstone {
				w.fatal("Envoy holds %s, which is no cluster", name)
			}
			continue
		}
		if held == nil || held.tombstone || held.sni != want.SNI || !slices.Equal(held.identities, want.Identities) ||
			!reflect.DeepEqual(held.endpoints, want.Endpoints) {
			w.fatal("Envoy holds %+v as %s, the Engine says %+v", held, name, want)
		}
		for _, ep := range held.endpoints {
			p, live := w.pods[ep.UID]
			if !live || p.Service != want.ID.Service || !slices.ContainsFunc(p.Ports, func(s model.PortStatus) bool {
				return s.Number == want.ID.Port && s.Protocol.Class() == want.Protocol.Class() && s.Health == ep.Health
			}) {
				w.fatal("%s has endpoint %s, which is %+v", name, ep.UID, p)
			}
		}
	}
}

// A model of the whole: pods, default ports, protocols and flat names change at random
// while Envoy gets routes, clusters and endpoints late, in any order among the types,
// restarts, or outlives the registrar. At no moment does a request for a port lead to
// another one or to another service (I1), and at rest no stray cluster is left (I2),
// every name is what the Engine says (I6), and no more names are kept than the cap (I9).
func TestModel(t *testing.T) {
	cfg := twoFlat()
	cfg.UnknownCap = 12
	w := &world{
		t: t, r: rand.New(rand.NewPCG(*modelSeed, 1)), cfg: cfg, now: t0, disk: store{}, envoy: newSimEnvoy(),
		pods: map[string]model.Endpoint{}, portless: map[string]map[string]bool{},
	}
	w.e = newEngine(t, cfg)
	w.pub = newSimPublisher(w.e, w.envoy, w.disk, w.log)
	for range *modelSteps {
		w.act()
	}
	w.rest()
}
