package dns

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// reconnectFirst and reconnectMost are the first and the longest pause
	// between two connections.
	reconnectFirst = 20 * time.Millisecond
	reconnectMost  = time.Second
	// connectTimeout is how long the process may take to answer at all.
	connectTimeout = 5 * time.Second
	// ackTimeout is how long the process may take for one revision. It opens a
	// few sockets for each pod; a process that takes longer hangs.
	ackTimeout = 15 * time.Second
)

// Run keeps the process' table equal to what is set, until ctx ends. It connects
// again whenever the connection is lost, at most a second later.
func (c *Client) Run(ctx context.Context) error {
	c.awaitWhole(ctx)
	pause := reconnectFirst
	for ctx.Err() == nil {
		err := c.connect(ctx)
		if c.disconnected(err) {
			pause = reconnectFirst
		}
		c.metrics.reconnects.Inc()
		//nolint:gosec // G404: the spread guards nothing
		timer := time.NewTimer(pause/2 + rand.N(pause/2))
		select {
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
		pause = min(2*pause, reconnectMost)
	}
	return nil
}

// awaitWhole returns when all names and pods were set, or ctx ended.
func (c *Client) awaitWhole(ctx context.Context) {
	_ = c.await(ctx, func() error {
		if !c.haveNames || !c.havePods {
			return c.lastErr
		}
		return nil
	})
}

// disconnected forgets what the process had acknowledged, and says whether it
// was connected.
func (c *Client) disconnected(err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.connected
	news := was || c.lastErr == nil || c.lastErr.Error() != err.Error()
	if news && !errors.Is(err, context.Canceled) {
		c.cfg.Log.Warn("mesh DNS not connected", "socket", c.cfg.Socket, "error", err)
	}
	c.connected, c.lastErr = false, err
	c.revision, c.ackedRevision, c.acked, c.sent = 0, 0, 0, 0
	for _, p := range c.pods {
		p.revision, p.status = 0, nil
	}
	c.dirty.reset(true)
	c.metrics.connected.Set(0)
	c.notifyLocked()
	return was
}

// connect runs one connection; it returns why it ended.
func (c *Client) connect(ctx context.Context) error {
	conn, err := grpc.NewClient("passthrough:///mesh-dns",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: connectTimeout}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(dnsv1.MaxMessage)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", c.cfg.Socket)
		}))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := dnsv1.NewMeshDNSServiceClient(conn).Sync(ctx)
	if err != nil {
		return err
	}
	received := make(chan struct{})
	acks := make(chan struct{}, 1)
	go func() {
		defer close(received)
		cancel(c.receive(stream, acks))
	}()
	hangs := time.AfterFunc(c.ackTimeout, func() {
		cancel(fmt.Errorf("no acknowledgement within %s", c.ackTimeout))
	})
	c.send(ctx, stream, conversation{acks: acks, hangs: hangs})
	hangs.Stop()
	cancel(nil)
	<-received
	return context.Cause(ctx)
}

// conversation is what send and receive share.
type conversation struct {
	// acks is told when the revision that was sent last holds.
	acks <-chan struct{}
	// hangs ends the connection unless it is stopped in time.
	hangs *time.Timer
}

// send sends one revision after the other, each when the one before holds: what
// is set meanwhile makes one. It returns when ctx ends, or is about to because
// the stream did; the reason is the context's.
func (c *Client) send(ctx context.Context, stream dnsv1.MeshDNSService_SyncClient, with conversation) {
	for {
		c.mu.Lock()
		chunks := c.nextLocked()
		c.mu.Unlock()
		if chunks == nil {
			with.hangs.Stop()
			select {
			case <-ctx.Done():
				return
			case <-c.wake:
			}
			continue
		}
		with.hangs.Reset(c.ackTimeout)
		for _, m := range chunks {
			// Why the stream ended is for receive to say.
			if err := stream.Send(m); err != nil {
				<-ctx.Done()
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-with.acks:
		}
	}
}

// receive takes what the process reports; acks is told when the revision that
// was sent last holds.
func (c *Client) receive(stream dnsv1.MeshDNSService_SyncClient, acks chan<- struct{}) error {
	for {
		resp, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := resp.Validate(); err != nil {
			return fmt.Errorf("mesh DNS reports: %w", err)
		}
		ack, whole := c.take(resp)
		if whole {
			select {
			case acks <- struct{}{}:
			default:
			}
		}
		if c.cfg.OnAck != nil {
			c.cfg.OnAck(ack)
		}
	}
}

// take keeps what is reported, and says whether a revision holds that did not before.
func (c *Client) take(resp *dnsv1.SyncResponse) (Ack, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ack := Ack{Revision: resp.GetRevision()}
	for _, m := range resp.GetPods() {
		st := podStatusFrom(m)
		ack.Pods = append(ack.Pods, st)
		if p := c.pods[st.Key]; p != nil {
			p.status = &st
		}
	}
	news := resp.GetRevision() > c.ackedRevision && resp.GetRevision() == c.revision
	if news {
		c.ackedRevision = resp.GetRevision()
		c.acked = c.sent
		if !c.connected {
			c.connected, c.lastErr = true, nil
			c.metrics.connected.Set(1)
			c.cfg.Log.Info("mesh DNS connected", "names", len(c.names), "pods", len(c.pods))
		}
	}
	c.notifyLocked()
	return ack, news
}

func podStatusFrom(m *dnsv1.PodStatus) PodStatus {
	st := PodStatus{
		Key:      model.KeyOf(m.GetAttachment()),
		Captured: m.GetCaptured(), CaptureErr: m.GetCaptureError(), Err: m.GetError(),
	}
	switch m.GetState() {
	case dnsv1.PodState_POD_STATE_SERVING, dnsv1.PodState_POD_STATE_DISABLED:
		st.Serving = true
	default:
		if st.Err == "" {
			st.Err = "its state is " + m.GetState().String()
		}
	}
	return st
}
