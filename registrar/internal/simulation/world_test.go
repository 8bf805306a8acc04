package simulation

import (
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/publisher"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

const (
	network    = "podnet"
	unknownCap = 12
	maxPods    = 8
	// tick is how long every step takes: longer than a write waits for others.
	tick = 2 * time.Millisecond
)

// profile is what a pod's annotations say.
type profile struct {
	ports string // as annotated
	def   uint16
}

func profiles() []profile {
	return []profile{
		{"8080", 8080},
		{"8080,9090", 8080},
		{"8080,9090", 9090},
		{"7000,8080,9090", 7000},
		{"5432=tcp,8080,9090", 5432},
		{"5432=tcp,8080", 8080},
		{"8080,9090=h2", 8080},
		{"9090", 9090},
		{"5432,8080", 8080},
		{"9090=tcp,8080", 8080},
		{"none", 0},
	}
}

// served are the ports of a profile, by its own reading of the annotation.
func (p profile) served() []port.Port {
	var out []port.Port
	for field := range strings.SplitSeq(p.ports, ",") {
		text, protocol, _ := strings.Cut(field, "=")
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			return nil
		}
		out = append(out, port.Port{Number: uint16(n), Protocol: map[string]port.Protocol{"": port.HTTP, "h2": port.H2, "tcp": port.TCP}[protocol]})
	}
	slices.SortFunc(out, func(a, b port.Port) int { return int(a.Number) - int(b.Number) })
	return out
}

// container is a sandbox of the runtime. Guarded by world.mu.
type container struct {
	key     model.AttachmentKey
	service model.ServiceKey
	addr    netip.Addr
	profile profile
	// former is what it had before an ADD that is at work.
	former    profile
	upstreams string
	// lives: its network namespace is there. attached: its last ADD succeeded. gone: the
	// registrar was told to forget it. busy: calls that have not returned.
	lives, attached, gone bool
	// spooled: its DEL waits in the spool; until the registrar takes it, the pod is there.
	spooled bool
	// proven: an ADD of it succeeded, or a registrar found it at its start.
	proven    bool
	busy      int
	listening map[uint16]bool
	// told is what the registrar last read of its listen table.
	told attach.PortState
}

// world is one run: the node around the registrar, which is real.
type world struct {
	t    *testing.T
	r    *rand.Rand
	dir  string
	dns  *meshDNS
	reg  *registrar // nil while it is down
	runs int

	envoys  []*envoy
	decoded *decoded
	tables  map[string]routeTable
	parsed  map[string]listener
	calls   []*call
	began   time.Time
	step    int

	issued atomic.Int64 // certificates

	mu         sync.Mutex // guards what follows, and the containers
	containers map[model.AttachmentKey]*container
	made       int
	unsigned   bool          // the signer is away
	disk       chan struct{} // closed: the disk works
	hung       int           // the step in which it began to hang, 0 if it does not
	trace      []string
	whole      io.Writer // gets every line of the trace
	faults     []string
	// served says in which step a place last served.
	served map[place]int
	// arrivals are load assignments to be held to served, when the step is over.
	arrivals []arrival
	// portless are the ports that a service's portless name may have had since the last
	// rest; excused are names that were asked for before their service could be routed.
	portless map[model.ServiceKey]map[uint16]bool
	excused  map[string]bool
	vips     map[string]model.ServiceKey
}

// arrival is a load assignment that an Envoy took into use.
type arrival struct {
	envoy, name string
	cluster     wireCluster
	endpoints   set
	// behind: the cluster that the Envoy has may mean something else by now. It may have
	// come back with it, rejected the next one, or not have answered for longer than
	// anything waits. Then the pod's guard, or the identity that the cluster pins,
	// refuses what it sends there.
	behind bool
}

// call is a CNI call under way.
type call struct {
	c    *container
	add  bool
	done bool
	err  error
}

// registrar is one process of `registrar run`.
type registrar struct {
	*pipeline
	path    string
	pods    *attach.Manager
	outside *outside
	ctx     context.Context //nolint:containedctx // that of the process
	cancel  context.CancelFunc
	ready   bool // guarded by world.mu
	working sync.WaitGroup
}

func newWorld(t *testing.T, seed uint64) *world {
	t.Helper()
	w := &world{
		t: t, began: time.Now(), r: rand.New(rand.NewPCG(seed, 7)), dir: t.TempDir(), dns: &meshDNS{},
		decoded: &decoded{clusters: map[string]wireCluster{}, assignments: map[string]set{}},
		tables:  map[string]routeTable{}, parsed: map[string]listener{},
		containers: map[model.AttachmentKey]*container{}, disk: make(chan struct{}), served: map[place]int{},
		portless: map[model.ServiceKey]map[uint16]bool{}, excused: map[string]bool{}, vips: map[string]model.ServiceKey{},
	}
	close(w.disk)
	w.whole = wholeTrace(t, seed)
	must(t, os.MkdirAll(filepath.Join(w.dir, "run", "netns"), 0o700))
	must(t, os.MkdirAll(filepath.Join(w.dir, "run", "spool"), 0o700))
	w.start("")
	for i := range 2 {
		e := &envoy{w: w, name: fmt.Sprint("envoy", i), holdings: newHoldings(), moody: true}
		w.envoys = append(w.envoys, e)
		e.connect(true)
	}
	w.settle()
	return w
}

func (w *world) netnsDir() string { return filepath.Join(w.dir, "run", "netns") }
func (w *world) spoolDir() string { return filepath.Join(w.dir, "run", "spool") }

// start starts a registrar over a copy of the state file, or over none.
func (w *world) start(state string) {
	w.t.Helper()
	w.runs++
	path := filepath.Join(w.dir, fmt.Sprint("state", w.runs), "state.db")
	must(w.t, os.MkdirAll(filepath.Dir(path), 0o700))
	if state != "" {
		text, err := os.ReadFile(state)
		must(w.t, err)
		must(w.t, os.WriteFile(path, text, 0o600))
		must(w.t, os.RemoveAll(filepath.Dir(state)))
	}
	r := &registrar{path: path}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.pipeline = startPipeline(w.t, setting{
		path: path, unknownCap: unknownCap, names: w.dns, log: silent(),
		wrap: func(c publisher.Catalogue) publisher.Catalogue { return disk{Catalogue: c, w: w} },
	})
	r.outside = &outside{
		w: w, publisher: r.publisher, watchers: map[model.AttachmentKey]*watched{}, uses: map[model.Identity]int{},
	}
	r.publisher.SetBundle(domain, []byte("roots"))
	var err error
	r.pods, err = attach.New(attach.Config{
		DB: r.db, Log: silent(), Node: "node", TrustDomain: domain, NetnsDir: w.netnsDir(), SpoolDir: w.spoolDir(),
		DrainWait: time.Second, SweepInterval: time.Hour, Now: time.Now,
		Mesh: r.publisher, Registry: r.backend, Identities: r.outside, Names: w.dns, Readiness: r.outside, Capture: capture{r.outside},
	})
	must(w.t, err)
	r.publisher.SyncPods(r.pods.SyncTCPPorts)
	w.reg = r
	r.working.Go(func() { w.serve(r) })
}

// serve is the order of a start, as app has it.
func (w *world) serve(r *registrar) {
	if r.publisher.AwaitSynced(r.ctx) != nil {
		return
	}
	if err := r.pods.Restore(r.ctx); err != nil && r.ctx.Err() == nil {
		w.log("restore: %v", err)
	}
	if oldest, ok := r.pods.Oldest(); ok {
		r.publisher.SetOldest(oldest)
	}
	var uids []string
	for _, p := range r.pods.Pods() {
		if len(p.Ports) > 0 {
			uids = append(uids, p.Key.String())
		}
	}
	if err := r.backend.Retain(r.ctx, uids); err != nil && r.ctx.Err() == nil {
		w.fail("retain: %v", err)
	}
	ctx, cancel := context.WithTimeout(r.ctx, 5*time.Second)
	defer cancel()
	_ = r.publisher.AwaitProjected(ctx, uids)
	if r.ctx.Err() != nil {
		return
	}
	r.cache.Release()
	w.mu.Lock()
	r.ready = true
	w.mu.Unlock()
}

// crash ends the registrar without a word, in the middle of whatever it does, and
// returns what its file is then.
func (w *world) crash() string {
	w.t.Helper()
	r := w.reg
	left := filepath.Join(w.dir, fmt.Sprint("left", w.runs), "state.db")
	must(w.t, os.MkdirAll(filepath.Dir(left), 0o700))
	text, err := os.ReadFile(r.path)
	must(w.t, err)
	must(w.t, os.WriteFile(left, text, 0o600))
	r.outside.mu.Lock()
	r.outside.dead = true
	r.outside.mu.Unlock()
	for _, e := range w.envoys {
		e.disconnect()
	}
	w.setDisk(true)
	r.cancel()
	r.working.Wait()
	r.close(w.t)
	must(w.t, os.RemoveAll(filepath.Dir(r.path)))
	w.reg = nil
	w.finishCalls(true)
	return left
}

func (w *world) setDisk(works bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.disk:
		if !works {
			w.disk, w.hung = make(chan struct{}), w.step
		}
	default:
		if works {
			close(w.disk)
		}
	}
}

func (w *world) diskWorks() bool {
	select {
	case <-w.diskGate():
		return true
	default:
		return false
	}
}

func (w *world) diskGate() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.disk
}

func (w *world) refuses() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unsigned
}

func (w *world) lives(key model.AttachmentKey) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.containers[key]
	return c != nil && c.lives
}

// read is the kernel's listen table of a pod, now: the app's sockets, and those that
// Envoys opened in its network namespace.
func (w *world) read(key model.AttachmentKey) attach.PortState {
	var s attach.PortState
	for _, e := range w.envoys {
		e.mu.Lock() // never with world.mu held
		has := func(name string) bool {
			l, ok := e.listeners[name]
			return ok && !slices.ContainsFunc(l.secrets, func(s string) bool { return !e.secrets[s] })
		}
		s.Inbound = s.Inbound || has(resource.InboundListener(key.String()))
		s.OutboundHTTP = s.OutboundHTTP || has(resource.OutboundHTTPListener(key.String()))
		s.OutboundTCP = s.OutboundTCP || has(resource.OutboundTCPListener(key.String()))
		e.mu.Unlock()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.containers[key]
	if c == nil {
		return attach.PortState{}
	}
	if c.lives {
		s.Listening = slices.Sorted(maps.Keys(c.listening))
	}
	c.told = s
	return s
}

func (w *world) log(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	line := fmt.Sprintf("%d (%s): ", w.step, time.Since(w.began).Round(time.Millisecond)) + fmt.Sprintf(format, args...)
	w.trace = append(w.trace, line)
	_, _ = fmt.Fprintln(w.whole, line)
	if len(w.trace) > 4000 {
		w.trace = slices.Clone(w.trace[2000:])
	}
}

// fail notes a fault; the world stops after the step.
func (w *world) fail(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = append(w.faults, fmt.Sprintf("step %d: ", w.step)+fmt.Sprintf(format, args...))
}

// try is for requests on a stream that may have ended.
func (w *world) try(err error) {
	if err != nil {
		w.log("%v", err)
	}
}

func (w *world) arrived(e *envoy, name string, c *simCluster) {
	w.mu.Lock()
	defer w.mu.Unlock()
	silent := e.silent[cache.OnDemandCluster] || e.silent[cache.WildcardCluster] || time.Since(e.answered) < tick
	w.arrivals = append(w.arrivals, arrival{
		envoy: e.name, name: name, cluster: c.wireCluster, endpoints: c.endpoints, behind: !e.behind.IsZero() || e.rejected || silent,
	})
}

func (w *world) listenerOf(r *discoveryv3.Resource) (listener, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if l, ok := w.parsed[r.GetVersion()]; ok {
		return l, nil
	}
	l, err := readListener(r.GetResource())
	w.parsed[r.GetVersion()] = l
	return l, err
}

func (w *world) routesOf(r *discoveryv3.Resource) (routeTable, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if t, ok := w.tables[r.GetVersion()]; ok {
		return t, nil
	}
	t, err := readRoutes(r)
	w.tables[r.GetVersion()] = t
	return t, err
}

// note writes a note of the plugin, without the cost of making it durable.
func (w *world) note(dir string, n *cniv1.Note) {
	w.t.Helper()
	n.UnixNanos = time.Now().UnixNano()
	name, err := spool.Name(n.Key(), spool.KindOf(n))
	must(w.t, err)
	text, err := protojson.Marshal(n)
	must(w.t, err)
	must(w.t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
}

func (w *world) removeNote(key model.AttachmentKey) {
	_ = os.Remove(filepath.Join(w.netnsDir(), key.String()+"."+string(spool.Attached)+".json"))
}

func (w *world) noteDeleted(c *container) {
	w.t.Helper()
	w.note(w.spoolDir(), &cniv1.Note{What: &cniv1.Note_Deleted{Deleted: &cniv1.DelRequest{Attachment: attachment(c.key), Network: network}}})
	w.mu.Lock()
	defer w.mu.Unlock()
	c.spooled = true
}

func attachment(key model.AttachmentKey) *cniv1.Attachment {
	return &cniv1.Attachment{ContainerId: key.ContainerID, Ifname: key.IfName}
}

func (c *container) request() *cniv1.AddRequest {
	annotations := map[string]string{"endpoint.aether.io/ports": c.profile.ports, "endpoint.aether.io/service": c.service.Name}
	if c.profile.def != 0 {
		annotations["endpoint.aether.io/port"] = strconv.Itoa(int(c.profile.def))
	}
	if c.upstreams != "" {
		annotations["config.aether.io/upstreams"] = c.upstreams
	}
	path := "/run/portolan/netns/" + c.key.String()
	return &cniv1.AddRequest{
		Attachment: attachment(c.key), Network: network, Netns: path, RuntimeNetns: path, Addresses: []string{c.addr.String()},
		CniArgs:     map[string]string{"K8S_POD_NAMESPACE": c.service.Namespace, "K8S_POD_NAME": c.key.ContainerID},
		Annotations: annotations, AnnotationsKnown: true,
	}
}

// settle lets everything come to rest after a step, and holds what must be true at
// every moment.
func (w *world) settle() {
	w.t.Helper()
	time.Sleep(tick)
	synctest.Wait()
	for range 20 {
		moved := false
		for _, e := range w.envoys {
			moved = e.follow() || moved
		}
		if !moved {
			break
		}
		time.Sleep(tick)
		synctest.Wait()
	}
	for _, e := range w.envoys {
		e.fetchTimeout()
	}
	w.finishCalls(false)
	w.verifyStep()
	if len(w.faults) > 0 {
		for _, line := range w.trace {
			w.t.Log(line)
		}
		if w.reg != nil {
			w.crash() // nothing may be left running
		}
		for _, e := range w.envoys {
			e.disconnect()
		}
		w.t.Fatal(strings.Join(w.faults, "\n"))
	}
}

// finishCalls does what the plugin and the runtime do when calls have returned.
// crashed: the registrar is gone, and so are the answers that had not come.
func (w *world) finishCalls(crashed bool) {
	w.t.Helper()
	w.mu.Lock()
	calls := w.calls
	w.calls = nil
	w.mu.Unlock()
	for _, call := range calls {
		w.mu.Lock()
		done, err, c := call.done, call.err, call.c
		if crashed {
			// Its answer is lost, and what it proved may be published.
			done, err, c.proven = true, context.Canceled, c.proven || call.add
		}
		w.mu.Unlock()
		if !done {
			w.calls = append(w.calls, call)
			continue
		}
		if c.busy--; c.busy == 0 {
			c.former = profile{}
		}
		switch {
		case call.add && err == nil:
			c.attached, c.proven = !c.gone, true
			w.log("ADD %s succeeded", c.key)
		case call.add:
			// The plugin's undo; the runtime gives the sandbox up.
			w.log("ADD %s failed: %v", c.key, err)
			w.mu.Lock()
			// What an earlier ADD attached is there until the DEL that follows.
			c.lives, c.gone, c.attached = false, crashed || !c.attached, false
			clear(c.listening)
			w.mu.Unlock()
			w.removeNote(c.key)
			if crashed {
				w.noteDeleted(c)
			}
		default:
			if err != nil {
				w.log("DEL %s failed: %v", c.key, err)
				w.noteDeleted(c)
			}
			w.mu.Lock()
			c.gone, c.attached = true, false
			w.mu.Unlock()
			w.removeNote(c.key)
		}
	}
}

func (w *world) ready() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.reg != nil && w.reg.ready
}

// do runs a CNI call against the registrar, as podserver would.
func (w *world) do(c *container, add bool, fn func(context.Context) error) {
	r := w.reg
	call := &call{c: c, add: add}
	w.calls = append(w.calls, call)
	c.busy++
	r.working.Go(func() {
		ctx, cancel := context.WithTimeout(r.ctx, 5*time.Second)
		defer cancel()
		err := fn(ctx)
		w.mu.Lock()
		defer w.mu.Unlock()
		call.done, call.err = true, err
	})
}

func (w *world) add(c *container) {
	w.t.Helper()
	req := c.request()
	w.mu.Lock()
	w.mayBeDefault(c.service, c.profile.def)
	w.mu.Unlock()
	w.log("ADD %s of %s at %s: %s, default %d", c.key, c.service, c.addr, c.profile.ports, c.profile.def)
	w.note(w.netnsDir(), &cniv1.Note{What: &cniv1.Note_Attached{Attached: req}})
	w.do(c, true, func(ctx context.Context) error {
		return w.reg.pods.Add(ctx, req, func(attach.Decision) error { return nil })
	})
}

func (w *world) del(c *container) {
	w.t.Helper()
	w.mu.Lock()
	c.lives = false
	clear(c.listening)
	c.gone = c.gone || c.busy == 0
	w.mu.Unlock()
	w.log("DEL %s", c.key)
	if !w.ready() {
		w.noteDeleted(c)
		w.removeNote(c.key)
		c.gone, c.attached = true, false
		return
	}
	pods, key := w.reg.pods, c.key
	w.do(c, false, func(ctx context.Context) error {
		_, err := pods.Del(ctx, key)
		return err
	})
}

// list returns the containers for which ok says so, in order.
func (w *world) list(ok func(*container) bool) []*container {
	var out []*container
	for _, key := range slices.SortedFunc(maps.Keys(w.containers), model.AttachmentKey.Compare) {
		if c := w.containers[key]; ok(c) {
			out = append(out, c)
		}
	}
	return out
}

func pick[T any](r *rand.Rand, list []T) (out T, ok bool) {
	if len(list) == 0 {
		return out, false
	}
	return list[r.IntN(len(list))], true
}

// create makes a sandbox. Its address is one that no living one has.
func (w *world) create() *container {
	services := []model.ServiceKey{
		{Namespace: "default", Name: "x"},
		{Namespace: "shop", Name: "x"},
		{Namespace: "ops", Name: "x"},
		{Namespace: "default", Name: "y"},
		{Namespace: "default", Name: "y"},
		{Namespace: "default", Name: "y"},
	}
	w.made++
	c := &container{
		key:     model.AttachmentKey{ContainerID: fmt.Sprintf("c%03d", w.made), IfName: "eth0"},
		service: services[w.r.IntN(len(services))], profile: profiles()[w.r.IntN(len(profiles()))],
		lives: true, listening: map[uint16]bool{},
	}
	if w.r.IntN(4) == 0 {
		c.upstreams = []string{"x", "y", "x.ops", "y,x.shop"}[w.r.IntN(4)]
	}
	for {
		c.addr = netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + w.r.IntN(maxPods+2))})
		if len(w.list(func(o *container) bool { return o.lives && o.addr == c.addr })) == 0 {
			break
		}
	}
	w.mu.Lock()
	w.containers[c.key] = c
	w.mu.Unlock()
	return c
}

// next begins a step.
func (w *world) next() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.step++
}

// act does one random thing.
func (w *world) act() {
	w.t.Helper()
	w.next()
	living := func(c *container) bool { return c.lives }
	switch n := w.r.IntN(1000); {
	case n < 70:
		if w.ready() && len(w.list(living)) < maxPods {
			w.add(w.create())
		}
	case n < 120:
		if c, ok := pick(w.r, w.list(func(c *container) bool { return c.attached || !c.lives && !c.gone })); ok && (c.busy == 0 || w.r.IntN(4) == 0) {
			w.del(c)
		}
	case n < 125:
		if c, ok := pick(w.r, w.list(func(c *container) bool { return c.busy > 0 && c.lives })); ok {
			w.del(c) // while its ADD is at work
		}
	case n < 140:
		if c, ok := pick(w.r, w.list(func(c *container) bool { return c.attached && c.lives })); ok {
			w.log("%s dies", c.key)
			w.mu.Lock()
			c.lives = false
			clear(c.listening)
			w.mu.Unlock()
		}
	case n < 150:
		if c, ok := pick(w.r, w.list(func(c *container) bool { return c.gone && c.busy == 0 })); ok {
			w.del(c) // a stale one
		}
	case n < 165:
		if c, ok := pick(w.r, w.list(func(c *container) bool { return c.attached && c.lives && c.busy == 0 })); ok && w.ready() {
			if w.r.IntN(2) == 0 {
				w.mu.Lock()
				c.former = c.profile
				c.profile = profiles()[w.r.IntN(len(profiles()))]
				w.mu.Unlock()
			}
			w.add(c) // again
		}
	case n < 290:
		if c, ok := pick(w.r, w.list(living)); ok {
			number := []uint16{5432, 7000, 8080, 9090}[w.r.IntN(4)]
			w.mu.Lock()
			if c.listening[number] && w.r.IntN(3) == 0 {
				delete(c.listening, number)
			} else {
				c.listening[number] = true
			}
			w.mu.Unlock()
		}
	case n < 400:
		if c, ok := pick(w.r, w.list(func(*container) bool { return true })); ok && w.reg != nil {
			w.log("the table of %s is read", c.key)
			w.reg.outside.tell(c.key)
		}
	case n < 620:
		w.request(w.envoys[w.r.IntN(len(w.envoys))])
	case n < 800:
		e := w.envoys[w.r.IntN(len(w.envoys))]
		kind := cache.Kinds()[w.r.IntN(len(cache.Kinds()))]
		if e.connected {
			w.log("%s acknowledges what it withheld of %s", e.name, kind)
			e.answer(kind)
		}
	case n < 822:
		e := w.envoys[w.r.IntN(len(w.envoys))]
		w.log("%s is cut off", e.name)
		e.disconnect()
	case n < 870:
		if e := w.envoys[w.r.IntN(len(w.envoys))]; !e.connected && w.reg != nil {
			w.log("%s connects again", e.name)
			e.connect(false)
		}
	case n < 874:
		if e := w.envoys[w.r.IntN(len(w.envoys))]; w.reg != nil {
			w.log("%s is a new process", e.name)
			e.disconnect()
			e.connect(true)
		}
	case n < 882:
		w.rare()
	case n < 900:
		if w.ready() {
			w.collect()
		}
	case n < 915:
		w.mu.Lock()
		w.unsigned = !w.unsigned && w.r.IntN(3) == 0
		w.mu.Unlock()
	case n < 930:
		works := w.r.IntN(4) != 0
		w.log("the disk works: %t", works)
		w.setDisk(works)
	case n < 990:
		time.Sleep(time.Duration(w.r.IntN(3000)) * time.Millisecond)
	case n < 991:
		w.log("eleven minutes pass")
		w.excuseForgotten()
		time.Sleep(11 * time.Minute)
	}
	w.settle()
}

// excuseForgotten excuses what Envoys asked for of services that are about to be
// forgotten: it was asked for before the service that may come back (I2).
func (w *world) excuseForgotten() {
	served := map[model.ServiceKey]bool{}
	for _, c := range w.list(func(c *container) bool { return c.attached && !c.gone && c.lives }) {
		served[c.service] = true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.envoys {
		for name := range e.asked {
			host, _, _ := strings.Cut(name, ":")
			service, namespace, long := strings.Cut(strings.TrimSuffix(host, "."+domain), ".")
			namespaces := flatNamespaces()
			if long {
				namespaces = []string{namespace}
			}
			for _, ns := range namespaces {
				if !served[model.ServiceKey{Namespace: ns, Name: service}] {
					w.excused[name] = true
				}
			}
		}
	}
}

// rare is a crash, with the state file kept or lost.
func (w *world) rare() {
	w.t.Helper()
	hung := !w.diskWorks() // then routing went on without the disk (publisher: saveTimeout)
	left := w.crash()
	lost := w.r.IntN(5) == 0
	w.log("the registrar crashes; its file is lost: %t", lost)
	w.settle()
	for range w.r.IntN(6) { // meanwhile
		w.next()
		if c, ok := pick(w.r, w.list(func(c *container) bool { return c.attached })); ok && w.r.IntN(3) == 0 {
			w.del(c)
		}
		w.request(w.envoys[w.r.IntN(len(w.envoys))])
		w.settle()
	}
	if lost {
		left = ""
	}
	for _, e := range w.envoys {
		e.outlive(lost || hung)
	}
	w.mu.Lock()
	for _, c := range w.containers {
		c.proven = true
	}
	w.mu.Unlock()
	w.start(left)
}

// collect is the runtime's GC, or a sweep.
func (w *world) collect() {
	pods := w.reg.pods
	if w.r.IntN(2) == 0 {
		w.log("sweep")
		r := w.reg
		r.working.Go(func() { pods.Sweep(r.ctx) })
		return
	}
	var valid []model.AttachmentKey
	for _, c := range w.list(func(c *container) bool { return c.lives }) {
		valid = append(valid, c.key)
	}
	w.log("GC, %d are valid", len(valid))
	r := w.reg
	r.working.Go(func() { _, _ = pods.GC(r.ctx, network, valid) })
}

// authorities are the names that clients send.
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

// leaves reports whether a service that a name may be of is being forgotten.
func (w *world) leaves(host string) bool {
	name, _, _ := strings.Cut(host, ".")
	return w.reg != nil && slices.ContainsFunc(w.reg.publisher.Services(), func(v projection.View) bool {
		return v.Step == projection.Leaving && v.Service.Name == name
	})
}

// request is a client's: Envoy asks for the cluster that it leads to, once.
func (w *world) request(e *envoy) {
	names := authorities()
	name := names[w.r.IntN(len(names))]
	if w.r.IntN(8) == 0 {
		name = fmt.Sprintf("ghost%d.%s:%d", w.r.IntN(40), domain, 1+w.r.IntN(100))
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	cluster, ok := e.route(name)
	_, routed := e.routes.domains[name]
	if w.r.IntN(8) == 0 {
		told := w.dns.get()
		for _, host := range slices.Sorted(maps.Keys(told)) {
			if w.r.IntN(2) == 0 {
				cluster, ok, routed = netip.AddrPortFrom(told[host].V4, []uint16{5432, 9090}[w.r.IntN(2)]).String(), true, true
				break
			}
		}
	}
	if !ok || e.asked[cluster] || e.active[cluster] != nil {
		return
	}
	host, _, _ := strings.Cut(cluster, ":")
	_, resolves := w.dns.get()[host]
	// A name is told to DNS once every Envoy routes it that is there and answers in time.
	late := e.mayLackRoutes()
	// What does not resolve is of no service now, whatever an old route table says; nor is
	// what resolves until the disk works again.
	if e.outlived || !resolves || !routed && late || w.leaves(host) {
		w.mu.Lock()
		w.excused[cluster] = true
		w.mu.Unlock()
	}
	w.log("%s asks for %s", e.name, cluster)
	e.ask(cluster)
}
