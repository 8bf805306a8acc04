package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// The values that a registrar gives to mesh DNS; see package table.
type (
	// VIP holds the addresses of one service.
	VIP = table.VIP
	// Settings hold for all pods.
	Settings = table.Settings
	// Pod is one pod in whose network namespace DNS is served.
	Pod = table.Pod
)

// ClientConfig is what a Client needs.
type ClientConfig struct {
	// Socket of the mesh-DNS process.
	Socket string
	// Settings to begin with.
	Settings Settings
	// OnAck is told of everything that the process reports. It is called from
	// one goroutine and must not block. May be nil.
	OnAck func(Ack)
	// Registerer of the client's metrics. May be nil.
	Registerer prometheus.Registerer
	// Log is required.
	Log *slog.Logger
}

// Ack is what the mesh-DNS process reports.
type Ack struct {
	// Revision that holds now; it starts anew with every connection.
	Revision uint64
	// Pods whose state is new.
	Pods []PodStatus
}

// PodStatus is the state of one pod in the mesh-DNS process.
type PodStatus struct {
	// Key of the pod.
	Key model.AttachmentKey
	// Serving is true when all its sockets are open.
	Serving bool
	// Err says why it is not.
	Err string
	// Captured is true while its port 53 is redirected to us.
	Captured bool
	// CaptureErr says why it is not.
	CaptureErr string
}

// ClientStatus is how the connection is.
type ClientStatus struct {
	// Connected is true when the process has the whole table.
	Connected bool
	// Err says why it is not connected.
	Err string
	// Names and Pods are how many it is to have.
	Names, Pods int
	// States has every pod that was reported on since the connection began.
	States []PodStatus
}

// Client gives the mesh-DNS process its table and keeps it equal to what was set
// here. Setting never waits for the process: changes are collected, sent as one
// while an earlier one is on its way, and sent as a whole after a reconnection.
// Nothing is sent before SetNames and SetPods were called once: the process may
// know more than a registrar that has just started (contract 4.8). All methods
// may be called from anywhere.
type Client struct {
	cfg     ClientConfig
	metrics *clientMetrics
	// session orders this registrar among those that run at the same time.
	session uint64
	// ackTimeout is the constant, but for tests.
	ackTimeout time.Duration

	mu sync.Mutex
	// All below is guarded by mu.

	// settings, names and pods are what the process is to have.
	settings Settings
	names    map[string]VIP
	pods     map[model.AttachmentKey]*clientPod
	// haveNames and havePods are true once all of them were set.
	haveNames, havePods bool
	// changes counts what was set; acked is how much of it holds in the process.
	changes, acked uint64
	// dirty is what was set and not sent yet.
	dirty dirty
	// connected is true once the process has the whole table, on this connection.
	connected bool
	// lastErr says why it has not.
	lastErr error
	// revision was sent last, and has everything up to the change sent.
	revision, sent uint64
	// ackedRevision is the last one that holds.
	ackedRevision uint64
	// changed is closed, and replaced, when anything happened that may be waited for.
	changed chan struct{}
	// wake has room for one: there is something to send.
	wake chan struct{}
}

// dirty is what the next revision has to carry.
type dirty struct {
	// full makes it a full state.
	full     bool
	settings bool
	names    map[string]struct{}
	pods     map[model.AttachmentKey]struct{}
}

func (d *dirty) any() bool { return d.full || d.settings || len(d.names)+len(d.pods) > 0 }

func (d *dirty) reset(full bool) {
	*d = dirty{full: full, names: map[string]struct{}{}, pods: map[model.AttachmentKey]struct{}{}}
}

// clientPod is one pod.
type clientPod struct {
	conf Pod
	// revision in which it was sent last; 0 when it was not on this connection.
	revision uint64
	// status that was reported last on this connection; it is about conf once
	// revision is acknowledged.
	status *PodStatus
}

// NewClient returns a client that knows no names and no pods. An error is a
// mistake in the configuration.
func NewClient(cfg ClientConfig) (*Client, error) {
	if !filepath.IsAbs(cfg.Socket) {
		return nil, fmt.Errorf("socket %q of mesh DNS is no absolute path", cfg.Socket)
	}
	if cfg.Log == nil {
		return nil, errors.New("mesh-DNS client: Log is required")
	}
	if err := cfg.Settings.Message().Validate(); err != nil {
		return nil, fmt.Errorf("mesh-DNS client: %w", err)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return nil, fmt.Errorf("mesh-DNS client: read the clock since boot: %w", err)
	}
	c := &Client{
		cfg: cfg, metrics: newClientMetrics(cfg.Registerer), session: uint64(now.Nano()), ackTimeout: ackTimeout,
		settings: cfg.Settings, names: map[string]VIP{}, pods: map[model.AttachmentKey]*clientPod{},
		changed: make(chan struct{}), wake: make(chan struct{}, 1),
		lastErr: errors.New("the registrar does not know all names and pods yet"),
	}
	c.dirty.reset(true)
	return c, nil
}

// notifyLocked wakes everybody who waits.
func (c *Client) notifyLocked() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// Connected says whether the process has the whole table.
func (c *Client) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.connected
}

// Status returns how the connection and each pod is.
func (c *Client) Status() ClientStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := ClientStatus{Connected: c.connected, Names: len(c.names), Pods: len(c.pods)}
	if c.lastErr != nil {
		s.Err = c.lastErr.Error()
	}
	for _, p := range c.pods {
		if p.status != nil {
			s.States = append(s.States, *p.status)
		}
	}
	return s
}

// AwaitPod returns when DNS is served in the pod as it was set last, or asked for
// nothing. When ctx ends first, the error says what is missing: the connection,
// or what the process reports about the pod, which it keeps trying.
func (c *Client) AwaitPod(ctx context.Context, key model.AttachmentKey) error {
	return c.await(ctx, func() error { return c.podLocked(key) })
}

// errUnknownPod ends a wait at once.
var errUnknownPod = errors.New("mesh DNS: the pod is not set, or was removed")

func (c *Client) podLocked(key model.AttachmentKey) error {
	p := c.pods[key]
	switch {
	case p == nil:
		return fmt.Errorf("%w: %s", errUnknownPod, key)
	case p.conf.Disabled:
		return nil
	case !c.connected:
		return c.notConnectedLocked()
	case p.revision == 0 || p.revision > c.ackedRevision || p.status == nil:
		return fmt.Errorf("mesh DNS has not acknowledged pod %s yet", key)
	case !p.status.Serving:
		return fmt.Errorf("mesh DNS does not serve pod %s: %s", key, p.status.Err)
	}
	return nil
}

func (c *Client) notConnectedLocked() error {
	return fmt.Errorf("mesh DNS not connected: %w (is `registrar dns` running?)", c.lastErr)
}

// Await returns when everything that was set before the call holds in the
// process, or with what is missing when ctx ends first.
func (c *Client) Await(ctx context.Context) error {
	c.mu.Lock()
	upTo := c.changes
	c.mu.Unlock()
	return c.await(ctx, func() error {
		switch {
		case !c.connected:
			return c.notConnectedLocked()
		case c.acked < upTo:
			return errors.New("mesh DNS has not acknowledged the last change yet")
		}
		return nil
	})
}

// await calls done, under the lock, after every change until it returns nil.
func (c *Client) await(ctx context.Context, done func() error) error {
	for {
		c.mu.Lock()
		err := done()
		changed := c.changed
		c.mu.Unlock()
		if err == nil || errors.Is(err, errUnknownPod) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-changed:
		}
	}
}
