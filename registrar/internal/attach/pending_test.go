package attach

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/portolan-mesh/portolan/api/annotation"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// everything is an annotation of each kind that counts when a pod is made.
func everything() map[string]string {
	return map[string]string{
		annotation.KeyPorts:                     "8080",
		annotation.KeyService:                   "payments",
		annotation.KeyWeight:                    "10",
		annotation.KeyUpstreams:                 "orders,stock.shop",
		annotation.KeyExcludePorts:              "25,3306",
		annotation.KeyExcludeRanges:             "10.0.0.0/8,fd00::/8",
		annotation.KeyMetadataPrefix + "track":  "a",
		annotation.KeyMetadataPrefix + "region": "",
	}
}

// but returns annotations with some of them set, and those taken away that are "-".
func but(annotations map[string]string, edits map[string]string) map[string]string {
	out := maps.Clone(annotations)
	maps.Copy(out, edits)
	maps.DeleteFunc(out, func(_, value string) bool { return value == "-" })
	return out
}

// The owner of a running pod is told once of every edit that does not count until the pod is
// made anew: of what it says, and of what the pod keeps. The status says so until the edit is
// taken back.
func TestPendingAnnotation(t *testing.T) {
	const metadata = annotation.KeyMetadataPrefix
	ports := map[string]string{annotation.KeyPorts: "8080"}
	for _, tt := range []struct {
		name string
		had  map[string]string
		edit map[string]string
		word annotation.Managed
		want []string
	}{
		{"service", everything(), map[string]string{annotation.KeyService: "bills"}, 0, []string{`endpoint.aether.io/service="bills": the running pod keeps "payments"`}},
		{"service taken away", everything(), map[string]string{annotation.KeyService: "-"}, 0, []string{`endpoint.aether.io/service is not there any more: the running pod keeps "payments"`}},
		{"service that the account named", ports, map[string]string{annotation.KeyService: "bills"}, 0, []string{`endpoint.aether.io/service="bills": the running pod keeps "till"`}},
		{"service as the account named it", ports, map[string]string{annotation.KeyService: "till"}, 0, nil},
		{"weight", everything(), map[string]string{annotation.KeyWeight: "5"}, 0, []string{`endpoint.aether.io/weight="5": the running pod keeps "10"`}},
		{"weight by default", ports, map[string]string{annotation.KeyWeight: "5"}, 0, []string{`endpoint.aether.io/weight="5": the running pod keeps "1"`}},
		{"the default weight", ports, map[string]string{annotation.KeyWeight: "1"}, 0, nil},
		{"metadata", everything(), map[string]string{metadata + "track": "-", metadata + "region": "eu", metadata + "zone": "z"}, 0, []string{
			`metadata.endpoint.aether.io/region="eu": the running pod keeps ""`,
			`metadata.endpoint.aether.io/track is not there any more: the running pod keeps "a"`,
			`metadata.endpoint.aether.io/zone="z": the running pod goes on without it`,
		}},
		{"the first metadata", ports, map[string]string{metadata + "zone": ""}, 0, []string{`metadata.endpoint.aether.io/zone="": the running pod goes on without it`}},
		{"lists", everything(), map[string]string{annotation.KeyUpstreams: "orders", annotation.KeyExcludePorts: "-", annotation.KeyExcludeRanges: "10.0.0.0/8"}, 0, []string{
			`config.aether.io/upstreams="orders": the running pod keeps "orders,stock.shop"`,
			`capture.aether.io/exclude-outbound-ports is not there any more: the running pod keeps "25,3306"`,
			`capture.aether.io/exclude-outbound-ip-ranges="10.0.0.0/8": the running pod keeps "10.0.0.0/8,fd00::/8"`,
		}},
		{"the first lists", ports, map[string]string{annotation.KeyUpstreams: "orders"}, 0, []string{`config.aether.io/upstreams="orders": the running pod goes on without it`}},
		{"the same, spelled otherwise", everything(), map[string]string{annotation.KeyUpstreams: "stock.shop, orders", annotation.KeyExcludePorts: "3306,25", annotation.KeyExcludeRanges: "fd00::1/8,10.1.0.0/8"}, 0, nil},
		{"what it joined by", ports, map[string]string{annotation.KeyPorts: "-"}, 0, []string{`the running pod stays in the mesh and keeps its ports: no port annotation and no aether.io/managed`}},
		{"what it joined by, which a label does too", ports, map[string]string{annotation.KeyPorts: "-"}, annotation.Joined, nil},
		{"to stay out", everything(), map[string]string{annotation.KeyManaged: "false", annotation.KeyWeight: "5"}, 0, []string{`the running pod stays in the mesh and keeps its ports: aether.io/managed is "false"`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, o, m := orchestrated(t)
			say := func(annotations map[string]string) {
				wl := workload(annotations)
				wl.Word = tt.word
				o.set(wl)
				for range 2 {
					m.Observe(t.Context(), wl)
					m.Sweep(t.Context())
				}
			}
			wl := workload(tt.had)
			wl.Word = tt.word
			o.set(wl)
			mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", tt.had))
			say(tt.had)
			expect(t, "events before the edit", o.reports)
			var want []string
			for _, text := range tt.want {
				want = append(want, "default/payments-1 PendingAnnotation: "+text+"; the edit counts when the pod is made anew")
			}
			say(but(tt.had, tt.edit))
			expect(t, "events", o.reports, want...)
			expect(t, "status", problems(m), want...)
			say(tt.had)
			expect(t, "status of the edit taken back", problems(m))
			expect(t, "events of the edit taken back", o.reports, want...)
		})
	}
}

// A pod that lost the annotation without which it cannot be made anew hears that.
func TestPendingAnnotationThatWouldFail(t *testing.T) {
	_, o, m := orchestrated(t)
	wl := workload(everything())
	wl.Account = "till.v2"
	o.set(wl)
	mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", everything()))
	wl.Annotations = but(everything(), map[string]string{annotation.KeyService: "-"})
	m.Observe(t.Context(), o.set(wl))
	expect(t, "events", o.reports, `default/payments-1 PendingAnnotation: the running pod keeps the service "payments", and made anew it would not start: `+
		`the pod's ServiceAccount "till.v2" cannot name its service, as it is not a DNS label: give the pod the annotation endpoint.aether.io/service, with a-z, 0-9 and "-" inside, at most 63`)
}

// An edit of many subset keys makes no flood of events.
func TestPendingAnnotationsAreBounded(t *testing.T) {
	_, o, m := serving(t, 8080, 9090)
	many := multiPort()
	for i := range annotation.MaxMetadata {
		many[fmt.Sprintf("%sk%02d", annotation.KeyMetadataPrefix, i)] = "v"
	}
	m.Observe(t.Context(), o.set(workload(many)))
	if len(o.reports) != maxPending {
		t.Errorf("%d events, want %d", len(o.reports), maxPending)
	}
}

// What a pod was given does not differ from what its annotations say because the registrar
// starts again, even for other addresses of services, or took the pod in while it ran. What
// does differ is known after a restart too.
func TestNothingPending(t *testing.T) {
	for name, annotations := range map[string]map[string]string{"all": everything(), "by label": nil} {
		member := func() model.Workload {
			w := workload(annotations)
			w.Word = annotation.Joined
			return w
		}
		look := func(t *testing.T, o *orchestra, m *Manager) {
			t.Helper()
			m.Observe(t.Context(), o.set(member()))
			m.Sweep(t.Context())
			expect(t, "events", o.reports)
			expect(t, "status", problems(m))
		}
		t.Run(name+", restart", func(t *testing.T) {
			w, o, m := orchestrated(t)
			o.set(member())
			mustAdd(t, m, addRequest("c1", "payments-1", "10.1.0.2", annotations))
			o, m = restarted(t, w, m)
			m.cfg.ServiceRanges = model.Ranges{netip.MustParsePrefix("10.0.0.0/8")}
			o.set(member())
			if err := m.Restore(t.Context()); err != nil {
				t.Fatal(err)
			}
			look(t, o, m)
			edited := member()
			edited.Annotations = but(everything(), map[string]string{annotation.KeyWeight: "5"})
			m.Observe(t.Context(), o.set(edited))
			if len(o.reports) == 0 {
				t.Error("an edit after the restart is silent")
			}
		})
		t.Run(name+", adoption", func(t *testing.T) {
			_, o, m := orchestrated(t)
			o.set(member())
			req := addRequest("c1", "payments-1", "10.1.0.2", nil)
			req.CniArgs[argUID], req.Netns = "u1", req.GetRuntimeNetns()
			o.sandboxes = []*cniv1.AddRequest{req}
			m.Sweep(t.Context())
			if len(m.Pods()) != 1 {
				t.Fatal("it was not adopted")
			}
			look(t, o, m)
		})
	}
}

// A pod whose sandbox was made anew, and whose former one was not taken away yet, was given
// what the new one was.
func TestNothingPendingOfFormerSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, o, m := serving(t, 8080, 9090)
		next := but(multiPort(), map[string]string{annotation.KeyWeight: "5"})
		o.set(workload(next))
		time.Sleep(time.Second) // fake time
		mustAdd(t, m, addRequest("c0", "payments-1", "10.1.0.3", next))
		for range 3 {
			m.Observe(t.Context(), workload(next))
			m.Sweep(t.Context())
		}
		expect(t, "events", o.reports)
		if _, err := m.Del(t.Context(), key("c1")); err != nil {
			t.Fatal(err)
		}
		m.Observe(t.Context(), workload(next))
		expect(t, "events without the former", o.reports)
		expect(t, "status without the former", problems(m))
	})
}
