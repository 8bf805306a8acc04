package attach

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/portolan-mesh/portolan/api/annotation"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// The event of a pod whose port 9090, of multiPort, is silent, and that of both its ports.
const (
	silent9090 = `default/payments-1 NotListening: endpoint.aether.io/ports="8080,9090=h2": nobody listens on port 9090 where the mesh delivers, so no request is sent there; ` + silentRemedy
	silentBoth = `default/payments-1 NotListening: endpoint.aether.io/ports="8080,9090=h2": nobody listens on ports 8080 and 9090 where the mesh delivers, so no request is sent there; ` + silentRemedy

	silentRemedy = `listen on 127.0.0.1, 0.0.0.0 or dual-stack ::, or name there only ports that the pod serves, or "none"`
)

// run runs m until the test ends. The bubble's clock is the package's.
func run(t *testing.T, m *Manager) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// told returns the events since it was called last, so much time from now.
func (o *orchestra) told(d time.Duration) []string {
	time.Sleep(d) // fake time
	synctest.Wait()
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.heard
	o.heard = len(o.reports)
	return append([]string(nil), o.reports[before:]...)
}

// The owner of a Ready pod is told once of a port on which nobody listens for a minute. The
// status says so until somebody does; a listener that goes again is told of again.
func TestSilentPort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, o, m := serving(t, 8080)
		run(t, m)
		expect(t, "before a minute", o.told(time.Minute-time.Millisecond))
		expect(t, "status before it", problems(m))
		expect(t, "after it", o.told(2*time.Millisecond), silent9090)
		expect(t, "status after it", problems(m), silent9090)
		w.listen(key("c1"), listening(8080)) // no news
		expect(t, "told once", o.told(time.Hour))

		w.listen(key("c1"), listening(8080, 9090))
		expect(t, "when it listens", o.told(time.Hour))
		expect(t, "status when it listens", problems(m))
		w.listen(key("c1"), listening(8080))
		expect(t, "lost, before a minute", o.told(time.Minute-time.Millisecond))
		expect(t, "lost, after it", o.told(2*time.Millisecond), silent9090)

		if _, err := m.Del(t.Context(), key("c1")); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		expect(t, "status without the pod", outsiders(m))
	})
}

// The minute begins when the pod is Ready, whenever it was attached, and again each time
// that it becomes Ready. A pod that is on its way out owes nothing.
func TestSilentPortOfPodNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, o, m := serving(t, 8080)
		run(t, m)
		wl := workload(multiPort())
		set := func(ready bool, ending model.Ending) {
			wl.Ready, wl.Ending = ready, ending
			m.Observe(t.Context(), o.set(wl))
		}
		set(false, model.Living)
		expect(t, "not Ready", o.told(time.Hour))
		set(true, model.Living)
		expect(t, "Ready, before a minute", o.told(time.Minute-time.Millisecond))
		set(false, model.Living)
		expect(t, "not Ready any more", o.told(time.Hour))
		set(true, model.Living)
		expect(t, "Ready again, before a minute", o.told(time.Minute-time.Millisecond))
		expect(t, "Ready again, after it", o.told(2*time.Millisecond), silent9090)
		set(false, model.Living)
		expect(t, "not Ready once it was told", o.told(time.Second))
		expect(t, "status of one that is not Ready", problems(m))
		set(true, model.Living)
		set(true, model.Terminating)
		expect(t, "terminating", o.told(time.Hour))
		expect(t, "status of one that is terminating", problems(m))
		set(true, model.Finished)
		expect(t, "finished", o.told(time.Hour))
	})
}

// The minute of a port that a running pod gets begins when it is advertised. One event
// names all ports that are silent then; one that goes is not told of.
func TestSilentPortThatCame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, o, m := serving(t, 8080)
		run(t, m)
		wl := workload(nil)
		const store = 100 * time.Millisecond // more than the store takes, of fake time
		advertise := func(ports string) {
			wl.Annotations = map[string]string{annotation.KeyPorts: ports, annotation.KeyService: "payments"}
			m.Observe(t.Context(), o.set(wl))
			time.Sleep(store)
			w.listen(key("c1"), listening(8080)) // the watch begins again with the ports
		}
		expect(t, "the first", o.told(time.Hour), silent9090)
		advertise("8080,9090=h2,7000")
		expect(t, "before a minute", o.told(time.Minute-2*store))
		expect(t, "after it", o.told(2*store),
			`default/payments-1 NotListening: endpoint.aether.io/ports="8080,9090=h2,7000": nobody listens on ports 7000 and 9090 where the mesh delivers, so no request is sent there; `+silentRemedy)
		advertise("8080")
		expect(t, "on its way out", o.told(m.cfg.DrainWait))
		w.listen(key("c1"), listening(8080))
		expect(t, "advertised no more", o.told(time.Hour))
		expect(t, "status of one that serves what it advertises", problems(m))

		// A port that Envoy does not take yet is not advertised.
		w.hang()
		advertise("8080,6000")
		expect(t, "not proven", o.told(30*time.Minute))
	})
}

// One event names all ports that are silent, also those that one fault closes one after the
// other. Of some that recover there is no news, and the status names the others.
func TestSilentPorts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, o, m := serving(t)
		run(t, m)
		expect(t, "from the start", o.told(time.Hour), silentBoth)
		w.listen(key("c1"), listening(8080))
		expect(t, "8080 listens", o.told(time.Hour))
		expect(t, "status without 8080", problems(m), silent9090)
		w.listen(key("c1"), listening())
		expect(t, "8080 is lost, before a minute", o.told(time.Minute-time.Millisecond))
		expect(t, "8080 is lost, after it", o.told(2*time.Millisecond), silentBoth)

		w.listen(key("c1"), listening(8080, 9090))
		expect(t, "both listen", o.told(time.Hour))
		w.listen(key("c1"), listening(9090))
		time.Sleep(together) // fake time
		w.listen(key("c1"), listening())
		expect(t, "one after the other", o.told(time.Hour), silentBoth)

		w.listen(key("c1"), listening(8080, 9090))
		expect(t, "both listen again", o.told(time.Hour))
		w.listen(key("c1"), listening(8080))
		expect(t, "9090 is lost", o.told(30*time.Second))
		w.listen(key("c1"), listening())
		expect(t, "each at its time", o.told(time.Hour), silent9090, silentBoth)
	})
}

// The text says where somebody listens instead, and which annotation advertises the port.
func TestSilentPortText(t *testing.T) {
	for _, tt := range []struct {
		name        string
		annotations map[string]string
		misbound    []string
		want        string
	}{
		{
			"on the pod's address alone",
			map[string]string{annotation.KeyPorts: "8080"},
			[]string{"8080 (only on 10.1.0.2)"},
			`endpoint.aether.io/ports="8080": nobody listens on port 8080 where the mesh delivers, so no request is sent there; ` + silentRemedy + `; somebody listens on 8080 (only on 10.1.0.2)`,
		},
		{
			"by the key of one port",
			map[string]string{annotation.KeyPort: "8080"},
			nil,
			`endpoint.aether.io/port="8080": nobody listens on port 8080 where the mesh delivers, so no request is sent there; ` + silentRemedy,
		},
		{
			"by both keys, the default alone",
			map[string]string{annotation.KeyPorts: "9090", annotation.KeyPort: "8080"},
			nil,
			`endpoint.aether.io/port="8080": nobody listens on port 8080 where the mesh delivers, so no request is sent there; ` + silentRemedy,
		},
		{
			"by no key",
			map[string]string{annotation.KeyManaged: "true"},
			nil,
			`the pod has no annotation of its ports, so it advertises "8080": nobody listens on port 8080 where the mesh delivers, so no request is sent there; ` +
				`listen on 127.0.0.1, 0.0.0.0 or dual-stack ::, or name in endpoint.aether.io/ports only ports that the pod serves, or "none"`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, o, m := orchestrated(t)
				o.set(workload(tt.annotations))
				mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", tt.annotations))
				s := listening(9090)
				s.Misbound = tt.misbound
				w.listen(key("c1"), s)
				run(t, m)
				expect(t, "told", o.told(time.Hour), "default/payments-1 NotListening: "+tt.want)
			})
		})
	}
}

// A running pod keeps its ports when its annotations are edited to what does not count: the
// text names the ports that it has, and the annotation again once that says them. An edit
// of another annotation changes nothing of it.
func TestSilentPortOfFormerAnnotation(t *testing.T) {
	const kept = `default/payments-1 NotListening: the pod has the ports "8080,9090=h2", not those that its annotations say now: ` +
		`nobody listens on port 9090 where the mesh delivers, so no request is sent there; ` +
		`listen on 127.0.0.1, 0.0.0.0 or dual-stack ::, or name in endpoint.aether.io/ports only ports that the pod serves, or "none"`
	silent := func(problems []string) []string {
		return slices.DeleteFunc(problems, func(p string) bool { return !strings.Contains(p, reasonSilent) })
	}
	for _, tt := range []struct {
		name string
		to   map[string]string
		want string
	}{
		{"not valid", map[string]string{annotation.KeyService: "payments", annotation.KeyPorts: "8080,http"}, kept},
		{"taken away", map[string]string{annotation.KeyService: "payments"}, kept},
		{"to stay out", map[string]string{annotation.KeyManaged: "false", annotation.KeyPorts: "7000"}, kept},
		{"another annotation, not valid", map[string]string{annotation.KeyPorts: "8080,9090=h2", annotation.KeyWeight: "no"}, silent9090},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, o, m := serving(t, 8080)
				run(t, m)
				m.Observe(t.Context(), o.set(workload(tt.to)))
				expect(t, "event", silent(o.told(time.Hour)), tt.want)
				expect(t, "status", silent(problems(m)), tt.want)
				m.Observe(t.Context(), o.set(workload(multiPort())))
				expect(t, "event of the edit taken back", silent(o.told(time.Second)))
				expect(t, "status of the edit taken back", silent(problems(m)), silent9090)
			})
		})
	}
}

// A pod whose sandbox was made anew, and whose former one was not taken away yet, serves
// what the new one serves; and a listen table that was not read says nothing.
func TestSilentPortOfFormerSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, o, m := serving(t)
		mustAdd(t, m, addRequest("c2", "payments-1", "10.1.0.3", multiPort()))
		w.listen(key("c2"), listening(8080, 9090))
		run(t, m)
		expect(t, "with a former sandbox", o.told(time.Hour))
		w.listen(key("c2"), listening(8080))
		expect(t, "silent in both", o.told(time.Hour), silent9090)
	})
	synctest.Test(t, func(t *testing.T) {
		w, _, m := serving(t)
		w.unread = true
		o, again := restarted(t, w, m)
		o.set(workload(multiPort()))
		if err := again.Restore(t.Context()); err != nil {
			t.Fatal(err)
		}
		again.Observe(t.Context(), workload(multiPort()))
		run(t, again)
		expect(t, "unread", o.told(time.Hour))
		w.listen(key("c1"), listening(8080))
		expect(t, "read", o.told(time.Hour), silent9090)
	})
}

// Without an orchestrator a pod has no owner to tell, and nothing says when it should listen.
func TestSilentPortStandalone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := setup(t)
		mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", multiPort()))
		w.listen(key("c1"), listening(8080))
		run(t, m)
		time.Sleep(time.Hour) // fake time
		synctest.Wait()
		expect(t, "status", problems(m))
	})
}
