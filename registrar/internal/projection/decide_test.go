package projection

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Contract 2, the default port while pods disagree: among the defaults declared by
// HEALTHY endpoints, the port that most HEALTHY endpoints advertise; ties: most
// declared, then the lower number; before any is HEALTHY, among all (MESH-2). And its
// protocol, decided the same way. Each case is tried in every order of the pods.
func TestDecide(t *testing.T) {
	for _, tt := range []struct {
		name  string
		pods  []string
		want  string   // "default protocol"
		ports []string // "port protocol in the set"
		says  []string // conflicts
	}{
		{name: "agreement", pods: []string{"8080*+", "8080*+"}, want: "8080 http"},
		{
			name: "most advertise it", pods: []string{"8080*+ 9090+", "8080+ 9090*+", "9090*+"}, want: "9090 http",
			says: []string{"default port: 1 of 3 endpoints declares 8080, decided is 9090" + oneDefault},
		},
		{
			name: "advertising counts before declaring", pods: []string{"8080*+ 9090+", "8080*+ 9090+", "8080*+ 9090+", "9090*+"}, want: "9090 http",
			says: []string{"default port: 3 of 4 endpoints declare 8080, decided is 9090" + oneDefault},
		},
		{
			name: "a port that nobody declares is no candidate", pods: []string{"7000+ 8080*+", "7000+ 9090*+", "7000+ 9090*+"}, want: "9090 http",
			says: []string{"default port: 1 of 3 endpoints declares 8080, decided is 9090" + oneDefault},
		},
		{
			name: "tie: most declared", pods: []string{"8080*+ 9090+", "8080+ 9090*+", "8080+ 9090*+"}, want: "9090 http",
			says: []string{"default port: 1 of 3 endpoints declares 8080, decided is 9090" + oneDefault},
		},
		{
			name: "tie: lower number", pods: []string{"8080*+", "9090*+"}, want: "8080 http",
			says: []string{"default port: 1 of 2 endpoints declares 9090, decided is 8080" + oneDefault},
		},
		{
			name: "only HEALTHY endpoints vote", pods: []string{"8080*-", "8080*~", "9090*+"}, want: "9090 http",
			says: []string{"default port: 2 of 3 endpoints declare 8080, decided is 9090" + oneDefault},
		},
		{
			name: "HEALTHY by any port", pods: []string{"8080*- 9100+", "8080*- 9100+", "9090*+"}, want: "8080 http",
			says: []string{"default port: 1 of 3 endpoints declares 9090, decided is 8080" + oneDefault},
		},
		{
			name: "none HEALTHY: among all", pods: []string{"8080*-", "9090*~", "9090*-"}, want: "9090 http",
			says: []string{"default port: 1 of 3 endpoints declares 8080, decided is 9090" + oneDefault},
		},
		{
			name: "a tcp default", pods: []string{"5432=tcp*+", "5432=tcp*+", "8080*+"}, want: "5432 tcp",
			says: []string{"default port: 1 of 3 endpoints declares 8080, decided is 5432" + oneDefault},
		},
		{
			name: "h2 by majority, all stay in", pods: []string{"8080*+", "8080=h2*+", "8080=h2*+"}, want: "8080 h2", ports: []string{"8080 h2 3"},
			says: []string{"port 8080: 1 endpoint says http and 2 say h2, decided is h2" + oneProtocol},
		},
		{
			name: "http and h2 tie: http", pods: []string{"8080*+", "8080=h2*+"}, want: "8080 http", ports: []string{"8080 http 2"},
			says: []string{"port 8080: 1 endpoint says http and 1 says h2, decided is http; give all pods of the service one protocol for the port, or serve the other on another port"},
		},
		{
			name: "another wire class is left out", pods: []string{"8080=tcp*+", "8080*+", "8080*+"}, want: "8080 http", ports: []string{"8080 http 2"},
			says: []string{"port 8080: 1 of 3 endpoints speaks another protocol than the decided http and is left out" + oneProtocol},
		},
		{
			name: "the class first, then the protocol", pods: []string{"8080=tcp*+", "8080=tcp*+", "8080*+", "8080=h2*+", "8080=h2*+"}, want: "8080 h2", ports: []string{"8080 h2 3"},
			says: []string{
				"port 8080: 2 of 5 endpoints speak another protocol than the decided h2 and are left out" + oneProtocol,
				"port 8080: 1 endpoint says http and 2 say h2, decided is h2" + oneProtocol,
			},
		},
		{
			name: "class tie: http", pods: []string{"8080=tcp*+", "8080*+"}, want: "8080 http", ports: []string{"8080 http 1"},
			says: []string{"port 8080: 1 of 2 endpoints speaks another protocol than the decided http and is left out" + oneProtocol},
		},
		{
			name: "only HEALTHY endpoints decide the class", pods: []string{"8080=tcp*-", "8080=tcp*-", "8080*+"}, want: "8080 http", ports: []string{"8080 http 1"},
			says: []string{"port 8080: 2 of 3 endpoints speak another protocol than the decided http and are left out" + oneProtocol},
		},
		{
			name: "no HEALTHY endpoint lists the port: among all that do", pods: []string{"8080*+", "8080*- 9090=tcp-", "8080*- 9090=tcp-", "8080*- 9090-"}, want: "8080 http",
			ports: []string{"8080 http 1", "9090 tcp 0"},
			says:  []string{"port 9090: 1 of 3 endpoints speaks another protocol than the decided tcp and is left out" + oneProtocol},
		},
		{
			name: "an unknown protocol has no vote", pods: []string{"8080=quic*+", "8080=quic*+", "8080*+"}, want: "8080 http", ports: []string{"8080 http 1"},
			says: []string{"port 8080: 2 of 3 endpoints speak a protocol that this version does not know and are left out" + oneVersion},
		},
		{
			name: "nothing but unknown", pods: []string{"8080=quic*+"}, want: "8080 unknown", ports: []string{"8080 unknown 0"},
			says: []string{"port 8080: 1 of 1 endpoint speaks a protocol that this version does not know and is left out" + oneVersion},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			permute(len(tt.pods), func(order []int) {
				e := newEngine(t, testConfig())
				for _, i := range order {
					upsert(t, e, pod(fmt.Sprint(i), "default/s", fmt.Sprintf("10.0.0.%d", i+1), tt.pods[i]))
				}
				v := view(t, e, "default/s")
				if got := fmt.Sprint(v.Default, " ", v.DefaultProtocol); got != tt.want {
					t.Errorf("order %v: default %s, want %s", order, got, tt.want)
				}
				if tt.ports != nil {
					var got []string
					for _, p := range v.Ports {
						got = append(got, fmt.Sprint(p.Number, " ", p.Protocol, " ", p.Healthy+p.Draining))
					}
					check(t, "ports", got, tt.ports)
				}
				check(t, "conflicts", v.Conflicts, tt.says)
			})
		})
	}
}

// permute calls f with every order of n things.
func permute(n int, f func([]int)) {
	var rec func(done, rest []int)
	rec = func(done, rest []int) {
		if len(rest) == 0 {
			f(done)
		}
		for i := range rest {
			rec(append(slices.Clone(done), rest[i]), slices.Delete(slices.Clone(rest), i, i+1))
		}
	}
	rest := make([]int, n)
	for i := range rest {
		rest[i] = i
	}
	rec(nil, rest)
}

// The counts that status shows (contract 4.5): the advertised union, what is in each
// set, and what is left out.
func TestPortCounts(t *testing.T) {
	e := newEngine(t, testConfig(),
		pod("a", "default/s", "10.0.0.1", "8080*+ 9090+"),
		pod("b", "default/s", "10.0.0.2", "8080*~ 9090=tcp+"),
		pod("c", "default/s", "10.0.0.3", "8080*- 9090+"))
	var got []string
	for _, p := range view(t, e, "default/s").Ports {
		got = append(got, strings.TrimSpace(fmt.Sprintf("%d %s advertised %d healthy %d draining %d left out %d",
			p.Number, p.Protocol, p.Advertised, p.Healthy, p.Draining, p.LeftOut)))
	}
	check(t, "ports", got, []string{
		"8080 http advertised 3 healthy 1 draining 1 left out 0",
		"9090 http advertised 3 healthy 2 draining 0 left out 1",
	})
}

// A port whose class changes is in one kind of cluster at a time, and a pod is never in
// a cluster of a class that it does not speak: HTTP never becomes TCP silently
// (contract 2, MESH-47).
func TestClassChange(t *testing.T) {
	const svc = "default/s"
	e := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", "7000+ 8080*+"), pod("b", svc, "10.0.0.2", "7000=tcp+ 8080*+"))
	v := view(t, e, svc)
	check(t, "http decided", clusters(v), []string{"s 8080 http: a b", "s:7000 7000 http: a"})
	remove(e, "a")
	changes := e.TakeDirty()
	if len(changes) != 1 || !changes[0].Shape || !changes[0].Clusters || !slices.Contains(changes[0].Ports, 7000) {
		t.Errorf("changes: %+v", changes)
	}
	v = view(t, e, svc)
	check(t, "tcp ports", v.TCPPorts, []uint16{7000})
	check(t, "tcp decided", clusters(v), []string{
		"s 8080 http: b",
		fmt.Sprintf("%s:7000 7000.s.default tcp: b", v.VIP4), fmt.Sprintf("[%s]:7000 7000.s.default tcp: b", v.VIP6),
	})
	if a := e.Resolve("s.aether.internal:7000"); a.Kind != Tombstone {
		t.Errorf("HTTP to a tcp port: %s", a.Kind)
	}
}

// The class of a port can change because of what pods say about another one, as that
// makes them HEALTHY; the Change names the port all the same.
func TestClassChangesByHealth(t *testing.T) {
	const svc, not, yes = "default/s", "8080*- 9090=tcp~", "8080*+ 9090=tcp~"
	e := newEngine(t, testConfig(), pod("a", svc, "10.0.0.1", "8080*+ 9090+"), pod("b", svc, "10.0.0.2", not), pod("c", svc, "10.0.0.3", not))
	check(t, "http decided", clusters(view(t, e, svc)), []string{"s 8080 http: a", "s:9090 9090 http: a"})
	upsert(t, e, pod("b", svc, "10.0.0.2", yes), pod("c", svc, "10.0.0.3", yes))
	changes := e.TakeDirty()
	if len(changes) != 1 || !slices.Equal(changes[0].Ports, []uint16{8080, 9090}) || !changes[0].Clusters {
		t.Errorf("changes: %+v", changes)
	}
	check(t, "tcp decided", view(t, e, svc).TCPPorts, []uint16{9090})
}
