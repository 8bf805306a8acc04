package simulation

import (
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/catalogue"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/projection"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/embedded"
	"github.com/portolan-mesh/portolan/registrar/internal/state"
)

// A mesh that is installed over the state of one with another trust domain has the
// services of its own pods alone, and their clusters admit nobody of the former one.
func TestReinstall(t *testing.T) {
	const former = "mesh.corp"
	http := port.Port{Number: 8080, Protocol: port.HTTP}
	record := func(name, trustDomain string) model.Endpoint {
		return model.Endpoint{
			UID: name, Generation: 1, Since: time.Unix(1_700_000_000, 0), Service: model.ServiceKey{Namespace: "default", Name: name},
			Identity:  model.Identity{TrustDomain: trustDomain, Namespace: "default", Account: name},
			Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, Weight: 1,
			Default: http.Number, Ports: []model.PortStatus{{Port: http, Health: model.Healthy}},
		}
	}
	path := filepath.Join(t.TempDir(), "state.db")
	db, _, err := state.Open(path, silent())
	must(t, err)
	records, err := embedded.Open(embedded.Options{
		DB: db, TrustDomain: former, Log: silent(), MeshName: func(model.ServiceKey) string { return "" },
	})
	must(t, err)
	entries, err := catalogue.Open(db, former, silent())
	must(t, err)
	for _, name := range []string{"back", "dead"} {
		ep := record(name, former)
		must(t, records.Publish(t.Context(), ep))
		must(t, entries.Save([]projection.Entry{{
			Service: ep.Service, Ports: []port.Port{http}, Default: http.Number, Committed: http, Accounts: []string{ep.Identity.SPIFFE()},
		}}, nil))
	}
	must(t, records.Close())
	must(t, db.Close())

	p := startPipeline(t, setting{path: path, unknownCap: 1000, names: &told{}, log: silent()})
	defer p.close(t)
	must(t, p.publisher.AwaitSynced(t.Context()))
	must(t, p.backend.Publish(t.Context(), record("back", domain)))
	must(t, p.publisher.AwaitProjected(t.Context(), []string{"back"}))
	got := map[string][]string{}
	for _, s := range p.publisher.Services() {
		for _, c := range s.Clusters {
			got[c.Name] = c.Identities
		}
	}
	want := map[string][]string{"back." + domain: {"spiffe://" + domain + "/ns/default/sa/back"}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("clusters (-want +got):\n%s", d)
	}
}
