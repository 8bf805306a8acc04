package pods

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/forward"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/responder"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// forwardAll forwards everything.
type forwardAll struct{}

func (forwardAll) Respond(responder.Query) responder.Decision {
	return responder.Decision{Outcome: responder.Forwarded, Limit: responder.MaxTCP}
}

// echo answers after a while with the query.
type echo struct{ after time.Duration }

func (e echo) Exchange(ctx context.Context, req forward.Request) ([]byte, error) {
	if !sleep(ctx, e.after) {
		return nil, ctx.Err()
	}
	return req.Query, nil
}

func newTestService(f Forwarder) *service {
	return &service{
		responder: forwardAll{}, forwarder: f, share: forward.NewLimiter(forward.DefaultLimits()).Share(),
		metrics: NewMetrics(prometheus.NewRegistry()), log: slog.New(slog.DiscardHandler),
		pod: func() table.Pod { return table.Pod{} }, upstreams: func() []netip.AddrPort { return nil },
	}
}

// A connection on which nothing begins for 10 s is closed, one on which a query
// does not end for 5 s as well; a look-up that takes as long as look-ups may is
// not cut off. Times are those of a fake clock.
func TestStreamTimeouts(t *testing.T) {
	frame := append([]byte{0, 20}, make([]byte, 20)...)
	for _, tc := range []struct {
		name   string
		client func(t *testing.T, conn net.Conn)
		want   time.Duration
	}{
		{name: "idle", client: func(*testing.T, net.Conn) {}, want: 10 * time.Second},
		{name: "half a query", client: func(t *testing.T, conn net.Conn) {
			t.Helper()
			if _, err := conn.Write(frame[:10]); err != nil {
				t.Error(err)
			}
		}, want: 5 * time.Second},
		{name: "idle after a slow answer", client: func(t *testing.T, conn net.Conn) {
			t.Helper()
			if _, err := conn.Write(frame); err != nil {
				t.Error(err)
			}
			if _, err := io.ReadFull(conn, make([]byte, len(frame))); err != nil {
				t.Errorf("the slow answer: %v", err)
			}
		}, want: 10 * time.Second},
		{name: "does not read", client: func(t *testing.T, conn net.Conn) {
			t.Helper()
			if _, err := conn.Write(frame); err != nil {
				t.Error(err)
			}
		}, want: 9 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestService(echo{after: 4 * time.Second})
				client, server := net.Pipe()
				start := time.Now()
				done := make(chan struct{})
				go func() {
					defer close(done)
					s.serveConn(t.Context(), server)
				}()
				tc.client(t, client)
				<-done
				if took := time.Since(start); took != tc.want {
					t.Errorf("ended after %s, want %s", took, tc.want)
				}
				_, _ = client.Close(), server.Close()
				s.running.Wait()
			})
		})
	}
}

// A socket that fails although nobody closed it ends the service of its pod with
// the reason, so that it is opened again; a closed one does not.
func TestSocketFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set := New(Config{
			Metrics:   NewMetrics(prometheus.NewRegistry()),
			OpenAlive: func(string) (Alive, error) { return nil, errors.New("no rules") },
			OnChange:  func(model.AttachmentKey) {},
		})
		p := &pod{set: set}
		s := newTestService(echo{})
		s.failed = make(chan error, 1)
		s.report(net.ErrClosed)
		time.AfterFunc(time.Second, func() { s.report(errors.New("broken")) })
		id, err := identityAt("/proc/thread-self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		err = p.keepAlive(t.Context(), watch{service: s, netns: "/proc/thread-self/ns/net", id: id})
		if err == nil || err.Error() != "a socket failed: broken" || time.Since(start) != time.Second {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
	})
}
