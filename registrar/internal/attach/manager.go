package attach

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	bolt "go.etcd.io/bbolt"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Mesh is what the publisher offers for local pods.
type Mesh interface {
	// AwaitReady waits until Envoy is connected and the registry is synced; the
	// error names what is missing.
	AwaitReady(ctx context.Context) error
	// Missing names what AwaitReady would wait for, or is empty.
	Missing() string
	// AddPod builds the pod's clusters and listeners.
	AddPod(pod model.Pod)
	// RemovePod takes them away, listeners first.
	RemovePod(key model.AttachmentKey)
	// AwaitListeners waits until Envoy acknowledged the pod's listeners.
	AwaitListeners(ctx context.Context, key model.AttachmentKey) error
	// AwaitSecrets waits until Envoy acknowledged the secrets that the pod's
	// listeners use; call it once they listen.
	AwaitSecrets(ctx context.Context, key model.AttachmentKey) error
	// AwaitWithdrawn waits until Envoy acknowledged load assignments of the
	// service that no longer name the endpoint.
	AwaitWithdrawn(ctx context.Context, service model.ServiceKey, uid string) error
	// TCPPorts are the (VIP, port) pairs of raw TCP as of now.
	TCPPorts() []netip.AddrPort
}

// Registry is where endpoints are published (contract 4.7).
type Registry interface {
	Publish(ctx context.Context, ep model.Endpoint) error
	Withdraw(ctx context.Context, uid string, generation uint64) error
}

// Identities issues certificates.
type Identities interface {
	// Ensure returns once the identity has a certificate that was handed to the mesh.
	Ensure(ctx context.Context, id model.Identity) error
	// Release drops one use of the identity.
	Release(id model.Identity)
}

// Names is the mesh DNS.
type Names interface {
	// Missing names what is wrong with the mesh DNS, or is empty.
	Missing() string
	SetPod(pod model.Pod)
	RemovePod(key model.AttachmentKey)
	// AwaitPod waits until the pod's DNS sockets are open.
	AwaitPod(ctx context.Context, key model.AttachmentKey) error
}

// PortState is what the listen table of a pod's netns says (contract 4.2, 4.3).
type PortState struct {
	// Inbound, OutboundHTTP and OutboundTCP are the mesh's own listeners.
	Inbound, OutboundHTTP, OutboundTCP bool
	// Listening are the pod's ports that the app hop can reach, ascending.
	Listening []uint16
	// Misbound says which ports listen only where the hop cannot reach them.
	Misbound []string
}

// Readiness watches listen tables.
type Readiness interface {
	// Watch calls fn with the first state and with every change, until Forget.
	Watch(pod model.Pod, fn func(PortState)) error
	// Kick looks at the pod's table now, if it is watched.
	Kick(key model.AttachmentKey)
	Forget(key model.AttachmentKey)
}

// Capture programs a pod's netns.
type Capture interface {
	// SetTCPPorts makes the pod's sets exactly ports.
	SetTCPPorts(pod model.Pod, ports []netip.AddrPort) error
	// Ensure programs the whole capture again when something of it is missing;
	// it reports whether it had to.
	Ensure(pod model.Pod, ports []netip.AddrPort) (bool, error)
	// Gone reports whether the pod's netns is gone: the runtime's path is missing
	// or means another netns than the pin.
	Gone(pod model.Pod) bool
	// Remove takes the capture out of the pod; a pod without one, or without a netns,
	// is a success.
	Remove(pod model.Pod) error
	// Connected reports whether anybody has a connection to the pod's inbound listener;
	// nobody has one to a pod without a netns.
	Connected(pod model.Pod) (bool, error)
	// Disconnect resets the connections that others have with the pod's inbound
	// listener; a pod without a netns has none.
	Disconnect(pod model.Pod) error
	// Unpin removes the plugin's pin and note.
	Unpin(key model.AttachmentKey) error
}

// Workloads is what the orchestrator knows of this node's pods.
type Workloads interface {
	// Lookup returns a pod; it waits until ctx ends for one that was not seen yet.
	Lookup(ctx context.Context, namespace, name, uid string) (model.Workload, error)
	// Known is Lookup that does not wait.
	Known(namespace, name, uid string) (w model.Workload, ok bool)
	// Pods returns all of them; ok is false while not all are known yet.
	Pods() (pods []model.Workload, ok bool)
}

// Sandboxes is the runtime's word on what runs here.
type Sandboxes interface {
	// List returns every running sandbox with a network of its own, as an ADD would
	// have told of it; the netns is the runtime's path.
	List(ctx context.Context) ([]*cniv1.AddRequest, error)
}

// Reporter tells a pod's owner what is wrong with the pod.
type Reporter interface {
	Report(w model.Workload, reason, message string)
}

// Config is what Manager needs.
type Config struct {
	DB          *bolt.DB
	Log         *slog.Logger
	Node        string
	TrustDomain string
	// ServiceRanges are those of the mesh's service addresses: no pod may have one.
	ServiceRanges model.Ranges
	// Locality is the node's at the start.
	Locality model.Locality
	// NetnsDir holds pins and notes; SpoolDir what the plugin could not deliver.
	NetnsDir, SpoolDir string
	// DrainWait bounds how long Del waits for callers to let go of the pod and for what
	// they have in flight.
	DrainWait time.Duration
	// SweepInterval is how often ghosts, the spool and captures are looked at.
	SweepInterval time.Duration
	// Now is the clock.
	Now func() time.Time
	// Unsupported says what the kernel lacks to mesh a pod; nil when nothing
	// (CNI-51). It is found once, at start.
	Unsupported error
	// Metrics takes the metrics; nil leaves them out.
	Metrics prometheus.Registerer

	Mesh       Mesh
	Registry   Registry
	Identities Identities
	Names      Names
	Readiness  Readiness
	Capture    Capture

	// Workloads, Sandboxes and Reporter are nil standalone: then every pod is Ready,
	// its account is its service, and nobody misses a pod.
	Workloads Workloads
	Sandboxes Sandboxes
	Reporter  Reporter
	// Bypass are namespaces whose pods never join late: the mesh's own and the
	// cluster's (contract 7).
	Bypass []string
}

// Manager owns the attachments of this node. Its methods are safe for
// concurrent use; calls for one attachment are serialised.
type Manager struct {
	cfg   Config
	store *store
	log   *slog.Logger
	keys  keyLocks
	count metrics
	// late wakes Run for pods that ask for the mesh while they run, changed wakes its look
	// at who listens.
	late, changed chan struct{}
	// newest is the highest generation that was given to a record or its end.
	newest atomic.Uint64

	// mu guards pods and every attachment's fields; it is never held across a
	// call to another package.
	mu   sync.Mutex
	pods map[model.AttachmentKey]*attachment
	// departed says when attachments were taken away that must not come back by adoption.
	departed map[model.AttachmentKey]time.Time
	// locality is the node's.
	locality model.Locality
	// complaints are what is wrong with pods now, by the UID of their object, so that each
	// is told once.
	complaints map[string]*complaints
	// missed pods, by the UID of their object, run outside the mesh and should be in it.
	missed map[string]bool
}

// attachment is one pod and how far it is. Guarded by Manager.mu.
type attachment struct {
	pod model.Pod
	// told: the mesh, DNS and readiness know the pod in this process.
	told bool
	// proven: the listeners were proven once (contract 4.2).
	proven bool
	// leaving: being torn down; never published again (XDS-47).
	leaving bool
	// unseen is when a sweep first missed the mirror of a static pod that the orchestrator
	// has not told of in this process.
	unseen time.Time
	// misses counts the sweeps that found the netns gone.
	misses int
	// generation of the last published record, 1 if an earlier process published it; 0
	// if there is none, or it was withdrawn.
	generation uint64
	// state is what the listen table said last; unread says that an earlier process
	// published the pod and that in this one the table has not been read yet.
	state  PortState
	unread bool
	// workload is what the orchestrator said last; nil standalone, and until it
	// spoke in this process.
	workload *model.Workload
	// unproven are ports that are not to be called: those that the pod got while it ran
	// and whose chains Envoy has not acknowledged, and those that are about to go.
	unproven []uint16
}

// New returns a Manager with what is stored already loaded, but not yet told to
// anybody: call Restore once the other parts run.
func New(cfg Config) (*Manager, error) {
	st, err := openStore(cfg.DB, cfg.Log)
	if err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, store: st, log: cfg.Log, locality: cfg.Locality,
		pods: map[model.AttachmentKey]*attachment{}, departed: map[model.AttachmentKey]time.Time{}, complaints: map[string]*complaints{},
		late: make(chan struct{}, 1), changed: make(chan struct{}, 1),
	}
	if err := m.count.register(cfg.Metrics, m); err != nil {
		return nil, err
	}
	pods, err := st.load()
	if err != nil {
		return nil, err
	}
	for _, p := range pods {
		m.pods[p.Key] = stored(p)
	}
	return m, nil
}

// stored is an attachment of an earlier process. It was proven, or its ADD failed and
// the plugin's undo is in the spool. Its ports stay as published until the listen table
// says else; whoever takes it away before that must withdraw them.
func stored(pod model.Pod) *attachment {
	a := &attachment{pod: pod, proven: true, unread: true}
	if len(pod.Ports) > 0 {
		a.generation = 1
	}
	return a
}

// Pods returns the attached pods in key order.
func (m *Manager) Pods() []model.Pod {
	return m.podsThat(func(*attachment) bool { return true })
}

// Told returns the attached pods that everybody was told of, in key order: after Restore
// all but those whose network namespace is not there.
func (m *Manager) Told() []model.Pod {
	return m.podsThat(func(a *attachment) bool { return a.told })
}

func (m *Manager) podsThat(is func(*attachment) bool) []model.Pod {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]model.Pod, 0, len(m.pods))
	for _, a := range m.pods {
		if !a.leaving && is(a) {
			out = append(out, a.pod)
		}
	}
	slices.SortFunc(out, func(a, b model.Pod) int { return a.Key.Compare(b.Key) })
	return out
}

// Oldest returns when the oldest living attachment was made; ok is false when
// there is none. An address freed before it can be given to another service.
func (m *Manager) Oldest() (t time.Time, ok bool) {
	for _, p := range m.Pods() {
		if !ok || p.Since.Before(t) {
			t, ok = p.Since, true
		}
	}
	return t, ok
}

// Missing names what an Add would have to wait for, or is empty (STATUS).
func (m *Manager) Missing() string {
	if m.cfg.Unsupported != nil {
		return m.cfg.Unsupported.Error()
	}
	if s := m.cfg.Mesh.Missing(); s != "" {
		return s
	}
	return m.cfg.Names.Missing()
}

// Status is one attachment for people.
type Status struct {
	Pod       model.Pod
	Proven    bool
	Leaving   bool
	Listening []uint16
	Misbound  []string
	// Problems are what is wrong with the pod, as its events say.
	Problems []Problem
}

// Phase says in one word how far the attachment is.
func (s Status) Phase() string {
	switch {
	case s.Leaving:
		return "leaving"
	case s.Proven:
		return "attached"
	}
	return "attaching"
}

// Listens reports whether the app listens where the mesh reaches it.
func (s Status) Listens(port uint16) bool { return slices.Contains(s.Listening, port) }

// Status returns every attachment in key order.
func (m *Manager) Status() []Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]Status, 0, len(m.pods))
	for _, a := range m.pods {
		st := Status{
			Pod: a.pod, Proven: a.proven, Leaving: a.leaving,
			Listening: slices.Clone(a.state.Listening), Misbound: slices.Clone(a.state.Misbound),
		}
		if c, ok := m.complaints[a.pod.UID]; ok {
			st.Problems = c.all()
		}
		out = append(out, st)
	}
	slices.SortFunc(out, func(a, b Status) int { return a.Pod.Key.Compare(b.Pod.Key) })
	return out
}

// Check returns the pod of an attachment; an error of kind NotFound when there
// is none.
func (m *Manager) Check(key model.AttachmentKey) (model.Pod, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a, ok := m.pods[key]; ok && !a.leaving {
		return a.pod, nil
	}
	return model.Pod{}, &Error{Kind: NotFound, Err: fmt.Errorf("attachment %s is not registered on this node", key)}
}
