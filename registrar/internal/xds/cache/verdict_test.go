package cache_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/xdstest"
)

// rejecting rejects responses that contain a name with the given content, with
// the reason that says makes of the name.
func (m *mesh) rejecting(name, content string, says func(string) string) xdstest.Judge {
	return func(resp *discoveryv3.DeltaDiscoveryResponse) verdict {
		for _, r := range resp.GetResources() {
			if r.GetName() == name && m.content(xdstest.Resource{Body: r.GetResource()}) == content {
				return xdstest.Nack(says(name))
			}
		}
		return xdstest.Ack()
	}
}

// byName is how Envoy reports a resource that failed when it was applied.
func byName(name string) string {
	return fmt.Sprintf("Error adding/updating listener(s) %s: failed to open netns file /run/x: No such file or directory\n", name)
}

// byDecoding is how Envoy reports a response that it could not take apart.
func byDecoding(string) string {
	return "Proto constraint validation failed (ListenerValidationError.Address: value is required)"
}

// A rejected resource is remembered with its reason and not sent again as it is;
// its neighbours are acknowledged, whether the rejection names the resource or
// refuses the whole response; a change or a touch tries again (XDS-R9, XDS-R10,
// MESH-20; contract 5: one bad resource does not stop others).
func TestRejection(t *testing.T) {
	for _, test := range []struct {
		name string
		says func(string) string
		// sent are the responses until only good ones are left.
		sent []string
	}{
		{name: "named", says: byName, sent: []string{
			"listener +a +b +c +d +e", "listener +a +b +d +e",
		}},
		{name: "whole response", says: byDecoding, sent: []string{
			"listener +a +b +c +d +e", "listener +a +b +c", "listener +d +e", "listener +a +b", "listener +c",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			bubble(t, func(m *mesh) {
				m.set(cache.Listener, "a", "1", "b", "1", "c", "bad", "d", "1", "e", "1")
				c, _ := m.open(options{node: "n1", judge: m.rejecting("c", "bad", test.says)})
				m.must(c.Subscribe(resource.ListenerType))
				n := m.got(c, 0, test.sent...)
				m.holds(c, cache.Listener, "a", "1", "b", "1", "d", "1", "e", "1")

				status := m.Status()
				if len(status.Rejections) != 1 {
					t.Fatalf("rejections %v, want one", status.Rejections)
				}
				got := status.Rejections[0]
				if got.Key != key(cache.Listener, "c") || !strings.Contains(got.Reason, test.says("c")) || got.Node != "n1" || got.At.IsZero() {
					t.Errorf("rejection %+v, want listener/c with its reason", got)
				}

				m.set(cache.Listener, "c", "bad") // no change
				n = m.got(c, n)
				m.set(cache.Listener, "a", "2")
				n = m.got(c, n, "listener +a")
				m.resend(key(cache.Listener, "c"))
				n = m.got(c, n, "listener +c")
				if got := m.Status().Rejections[0].Count; got != 2 {
					t.Errorf("rejected %d times, want 2", got)
				}
				m.set(cache.Listener, "c", "good")
				m.got(c, n, "listener +c")
				if got := m.Status().Rejections; len(got) != 0 {
					t.Errorf("rejections %v after a good version, want none", got)
				}
				m.holds(c, cache.Listener, "a", "2", "b", "1", "c", "good", "d", "1", "e", "1")
			})
		})
	}
}

// A rejected version is not taken as had: going back to the version before it is
// sent, and so is the removal (XDS-R9).
func TestRejectedVersionIsNotHad(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: m.rejecting("a", "bad", byName)})
		m.must(c.Subscribe(resource.ListenerType))
		m.set(cache.Listener, "a", "good")
		m.set(cache.Listener, "a", "bad")
		m.set(cache.Listener, "a", "good")
		m.set(cache.Listener, "a", "bad")
		m.remove(key(cache.Listener, "a"))
		m.got(c, 0, "listener", "listener +a", "listener +a", "listener +a", "listener +a", "listener -a")
	})
}

// A rejected version that was changed and changed back is not sent again, and
// is still what an await is told (XDS-R9).
func TestBackToRejectedVersion(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: m.rejecting("a", "bad", byName)})
		m.must(c.Subscribe(resource.ListenerType))
		m.set(cache.Listener, "a", "bad")
		c.SetJudge(withholdAll)
		m.set(cache.Listener, "b", "1")
		n := len(c.Order())
		m.set(cache.Listener, "a", "good")
		m.set(cache.Listener, "a", "bad")
		o := m.await(key(cache.Listener, "a"))
		m.release(c, cache.Listener)
		m.got(c, n)
		m.is(o, "rejected listener/a ("+byName("a")+")")
	})
}

// Every bad resource of many is found, in few responses, and nothing else is
// lost; afterwards nothing is sent any more (XDS-R9, XDS-R10).
func TestManyRejections(t *testing.T) {
	bubble(t, func(m *mesh) {
		const n = 200
		bad := map[string]bool{"l017": true, "l018": true, "l150": true}
		c, _ := m.open(options{judge: func(resp *discoveryv3.DeltaDiscoveryResponse) verdict {
			for _, r := range resp.GetResources() {
				if bad[r.GetName()] {
					return xdstest.Nack(byDecoding(""))
				}
			}
			return xdstest.Ack()
		}})
		var list []string
		for i := range n {
			list = append(list, fmt.Sprintf("l%03d", i), "x")
		}
		m.set(cache.Listener, list...)
		m.must(c.Subscribe(resource.ListenerType))
		if got := len(c.State(resource.ListenerType).Resources); got != n-len(bad) {
			t.Errorf("%d listeners held, want %d", got, n-len(bad))
		}
		if got := len(m.Status().Rejections); got != len(bad) {
			t.Errorf("%d rejections, want %d", got, len(bad))
		}
		if got := len(c.Order()); got > 2*8*len(bad) {
			t.Errorf("%d responses to find %d of %d", got, len(bad), n)
		}
		for _, typ := range m.Status().Streams[0].Types {
			if typ.Pending != 0 {
				t.Errorf("%d pending at rest", typ.Pending)
			}
		}
	})
}

// While parts of a rejected response are tried, new state is sent in between and
// a part that changed is sent in its new version only.
func TestChangesWhileParted(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: withholdAll})
		m.set(cache.Secret, "a", "1", "b", "1", "c", "1", "d", "1", "x", "1")
		m.must(c.Subscribe(resource.SecretType, "a", "b", "c", "d"))
		m.must(c.Subscribe(resource.SecretType, "x"))
		first := c.Order()[0].GetNonce()
		m.must(c.Send(nackOf(resource.SecretType, first, byDecoding(""))))
		m.got(c, 0, "secret +a +b +c +d", "secret +a +b")
		m.set(cache.Secret, "c", "2", "y", "1")
		m.must(c.Send(ackOf(resource.SecretType, c.Order()[1].GetNonce())))
		m.got(c, 2, "secret +c +x")
		m.must(c.Send(ackOf(resource.SecretType, c.Order()[2].GetNonce())))
		m.got(c, 3, "secret +d")
	})
}

// A part that changed and changed back while others are tried is not taken as
// had: nobody knows whether the client kept it (XDS-R10).
func TestPartChangedBack(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: withholdAll})
		m.set(cache.Secret, "a", "1", "b", "1")
		m.must(c.Subscribe(resource.SecretType, "a", "b"))
		m.must(c.Send(nackOf(resource.SecretType, c.Order()[0].GetNonce(), byDecoding(""))))
		m.set(cache.Secret, "b", "2")
		m.set(cache.Secret, "b", "1")
		o := m.await(key(cache.Secret, "b"))
		m.must(c.Send(ackOf(resource.SecretType, c.Order()[1].GetNonce())))
		m.got(c, 0, "secret +a +b", "secret +a", "secret +b")
		m.is(o, "pending")
		m.must(c.Send(ackOf(resource.SecretType, c.Order()[2].GetNonce())))
		m.is(o, "acknowledged")
	})
}

// A part of a rejected response that is to follow its cluster does not overtake
// it (dataplane decision 5).
func TestPartWaitsForGate(t *testing.T) {
	bubble(t, func(m *mesh) {
		ads, od, _ := m.envoy("n1", "pid 1")
		ads.SetJudge(withholdAll)
		m.set(cache.Endpoints, "a", "1", "b", "1")
		m.set(cache.OnDemandCluster, "b", "1")
		m.must(ads.Subscribe(resource.EndpointType, "a", "b"))
		m.must(ads.Send(nackOf(resource.EndpointType, ads.Order()[0].GetNonce(), byDecoding(""))))
		n := m.got(ads, 0, "endpoints +a +b", "endpoints +a")
		m.must(od.Subscribe(resource.ClusterType, "b"))
		m.must(ads.Send(ackOf(resource.EndpointType, ads.Order()[1].GetNonce())))
		n = m.got(ads, n)
		m.release(od, cache.OnDemandCluster)
		m.got(ads, n, "endpoints +b")
	})
}

// A rejection is logged once, with its resource, reason and origin, and a handler
// that blocks holds up neither streams nor awaits (XDS-R9; registrar MUST 1).
func TestRejectionIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &blockingWriter{block: make(chan struct{})}
		m := &mesh{T: t, Cache: cache.New(cache.Config{Logger: slog.New(slog.NewTextHandler(w, nil))})}
		m.Release()
		c, _ := m.open(options{node: "n1", judge: m.rejecting("a", "bad", byName)})
		m.must(c.Subscribe(resource.ListenerType))
		m.set(cache.Listener, "a", "bad", "b", "1")
		m.set(cache.Listener, "b", "2")
		m.holds(c, cache.Listener, "b", "2")
		m.is(m.await(key(cache.Listener, "b")), "acknowledged")
		close(w.block)
		synctest.Wait()
		lines := strings.Split(strings.TrimSpace(w.text), "\n")
		if len(lines) != 1 {
			t.Fatalf("%d log records, want one:\n%s", len(lines), w.text)
		}
		for _, want := range []string{"level=WARN", "type=listener", "resources=[a]", "stream=1", "node=n1", "No such file"} {
			if !strings.Contains(lines[0], want) {
				t.Errorf("log record without %s: %s", want, lines[0])
			}
		}
	})
}

// blockingWriter takes nothing before block is closed.
type blockingWriter struct {
	block chan struct{}
	text  string
}

// Write implements io.Writer.
func (w *blockingWriter) Write(p []byte) (int, error) {
	<-w.block
	w.text += string(p)
	return len(p), nil
}

// The acknowledged and the rejected are counted by type (XDS-R9).
func TestVerdictCounters(t *testing.T) {
	bubble(t, func(m *mesh) {
		c, _ := m.open(options{judge: m.rejecting("a", "bad", byName)})
		m.must(c.Subscribe(resource.ListenerType))
		m.set(cache.Listener, "a", "bad")
		synctest.Wait()
		want := cache.Counters{Responses: 2, Resources: 1, Acknowledged: 1, Rejected: 1}
		if diff := cmp.Diff(want, m.Metrics().Counters[cache.Listener]); diff != "" {
			t.Errorf("counters (-want +got):\n%s", diff)
		}
	})
}

func nackOf(typeURL, nonce, reason string) *discoveryv3.DeltaDiscoveryRequest {
	req := ackOf(typeURL, nonce)
	req.ErrorDetail = errorDetail(reason)
	return req
}

func ackOf(typeURL, nonce string) *discoveryv3.DeltaDiscoveryRequest {
	return &discoveryv3.DeltaDiscoveryRequest{TypeUrl: typeURL, ResponseNonce: nonce}
}
