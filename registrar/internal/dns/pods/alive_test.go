package pods_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/dnstest"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/pods"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

// Dataplane decision 9: the capture is refreshed only when the sockets are open,
// again and again within its 5 s, and withdrawn while they still are.
func TestAliveOrder(t *testing.T) {
	w := newWorld(t, nil)
	ns := dnstest.NewNamespace(t)
	a := w.alive(ns.Path)
	serves := func(when string) func() {
		return func() {
			if got := address(t, ns, "udp4", addr4, dns.TypeA); got != "198.18.0.1" {
				t.Errorf("at a %s: %s", when, got)
			}
		}
	}
	a.onRefresh, a.onWithdraw = serves("refresh"), serves("withdrawal")
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path})
	start := time.Now()
	dnstest.Eventually(t, func() string {
		if refreshed, _, _ := a.counts(); refreshed < 3 {
			return fmt.Sprintf("refreshed %d times, want 3", refreshed)
		}
		return ""
	})
	if took := time.Since(start); took > 8*time.Second {
		t.Errorf("three refreshes took %s; the capture ends after 5 s", took)
	}
	if st := w.status(t, "a"); !st.Captured || st.CaptureErr != "" {
		t.Errorf("status %+v, want captured", st)
	}
	w.remove(t, "a")
	if _, withdrawn, open := a.counts(); withdrawn != 1 || open != 0 {
		t.Errorf("withdrawn %d times, %d captures open; want 1 and 0", withdrawn, open)
	}
}

// The plugin programs the pod's rules at about the time when its sockets are
// opened: until then refreshing fails, is reported, holds nothing up, and is
// tried again so soon that no name is missed for long.
func TestAliveBeforeRules(t *testing.T) {
	w := newWorld(t, nil)
	ns := dnstest.NewNamespace(t)
	a := w.alive(ns.Path)
	a.setRefuse(errNoTable)
	w.put(t, table.Pod{Key: key("a"), Netns: ns.Path})
	if st := w.status(t, "a"); st.State != pods.Serving || st.Captured {
		t.Errorf("status %+v, want serving and not captured", st)
	}
	dnstest.Eventually(t, func() string {
		if st := w.status(t, "a"); !strings.Contains(st.CaptureErr, "table inet portolan is missing") {
			return fmt.Sprintf("status %+v, want the error", st)
		}
		return ""
	})
	errs := w.metric(t, "portolan_dns_capture_errors_total")
	dnstest.Eventually(t, func() string {
		if got := w.metric(t, "portolan_dns_capture_errors_total"); got < errs+3 {
			return fmt.Sprintf("%v tries failed, want more than %v", got, errs)
		}
		return ""
	})
	a.setRefuse(nil)
	start := time.Now()
	dnstest.Eventually(t, func() string {
		if st := w.status(t, "a"); !st.Captured {
			return fmt.Sprintf("status %+v, want captured", st)
		}
		return ""
	})
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("captured %s after the rules were there", took)
	}
	// A flushed table is noticed, and the capture is back when the table is.
	a.setRefuse(errNoTable)
	dnstest.Eventually(t, func() string {
		if st := w.status(t, "a"); st.State != pods.Serving || st.Captured {
			return fmt.Sprintf("status %+v, want not captured", st)
		}
		return ""
	})
	a.setRefuse(nil)
	dnstest.Eventually(t, func() string {
		if st := w.status(t, "a"); !st.Captured {
			return fmt.Sprintf("status %+v, want captured again", st)
		}
		return ""
	})
	if _, _, open := a.counts(); open != 1 {
		t.Errorf("%d captures open, want 1", open)
	}
}

// Contract 0: a graceful stop withdraws the capture of every pod at once, and a
// look-up that runs still gets its answer.
func TestCloseWithdrawsAndDrains(t *testing.T) {
	w := newWorld(t, nil)
	asked, goOn := make(chan struct{}), make(chan struct{})
	upstream := dnstest.NewResolver(t, nil, "127.0.0.1:0")
	upstream.Handle(func(rw dns.ResponseWriter, q *dns.Msg) {
		close(asked)
		<-goOn
		dnstest.Answer(rw, q)
	})
	var list []table.Pod
	var spaces []*dnstest.Namespace
	for i := range 5 {
		ns := dnstest.NewNamespace(t)
		spaces = append(spaces, ns)
		list = append(list, table.Pod{Key: key(fmt.Sprint(i)), Netns: ns.Path, Upstreams: append(w.table.Upstreams()[:0:0], upstream.Addr)})
	}
	w.alive(spaces[0].Path).onWithdraw = func() { close(goOn) }
	w.put(t, list...)
	dnstest.Eventually(t, func() string {
		if got := w.metric(t, "portolan_dns_pods_captured"); got != 5 {
			return fmt.Sprintf("%v pods are captured, want 5", got)
		}
		return ""
	})
	conn, err := spaces[0].Dial(t, "udp4", addr4)
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.WriteMsg(dnstest.Question("example.com", dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	<-asked
	w.set.Close()
	if err := conn.SetReadDeadline(time.Now().Add(dnstest.Patience)); err != nil {
		t.Fatal(err)
	}
	if m, err := conn.ReadMsg(); err != nil || len(m.Answer) != 1 {
		t.Errorf("the look-up that ran: %v, %v", m, err)
	}
	for i, ns := range spaces {
		if _, withdrawn, open := w.alive(ns.Path).counts(); withdrawn != 1 || open != 0 {
			t.Errorf("pod %d: withdrawn %d times, %d captures open; want 1 and 0", i, withdrawn, open)
		}
		if got := address(t, ns, "udp4", addr4, dns.TypeA); !strings.Contains(got, "refused") {
			t.Errorf("pod %d: %s", i, got)
		}
	}
}
