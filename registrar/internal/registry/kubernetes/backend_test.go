package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/registry"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/registrytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What every backend promises holds with an API server, too.
func TestConformance(t *testing.T) {
	c := newCluster(t)
	registrytest.Conform(t, func(t *testing.T) registry.Backend {
		t.Helper()
		for _, object := range c.list(t) {
			must(t, c.objects.delete(t.Context(), types.NamespacedName{Namespace: object.Namespace, Name: object.Name}, object.UID))
		}
		return newNode(t, registrytest.Node, c.server.Admin())
	})
}

// Two nodes see each other's records, equal in every field and in the order of their
// changes; the objects say what people need, and belong to their pods.
func TestTwoNodes(t *testing.T) {
	c := newCluster(t)
	n1, n2 := newNode(t, "n1", c.server.Admin()), newNode(t, "n2", c.server.Admin())
	log1, log2 := registrytest.Follow(t, n1), registrytest.Follow(t, n2)
	log1.AwaitComplete(t)
	log2.AwaitComplete(t)
	log2.Take()

	a := endpoint("n1", "a", 5)
	a.PodUID = "4c0b6ad5-0000-4000-8000-000000000001"
	must(t, n1.Publish(t.Context(), a))
	if got := log2.AwaitGeneration(t, a.UID, 5); !reflect.DeepEqual(got, a) {
		t.Errorf("n2 has %+v, want %+v", got, a)
	}
	must(t, n2.Publish(t.Context(), endpoint("n2", "b", 1)))
	log1.AwaitGeneration(t, uidOf("b"), 1)
	for g := uint64(6); g < 12; g++ { // each seen before the next: in order
		a.Generation, a.Ports[1].Health = g, model.Health(g%3)
		must(t, n1.Publish(t.Context(), a))
		if got := log2.AwaitGeneration(t, a.UID, g); got.Ports[1].Health != a.Ports[1].Health {
			t.Errorf("generation %d: %+v", g, got)
		}
	}

	objects := c.list(t)
	object := objects[key("a").Name]
	if object.Namespace != "shop" || len(object.OwnerReferences) != 1 || object.OwnerReferences[0].Kind != "Pod" || string(object.OwnerReferences[0].UID) != a.PodUID {
		t.Errorf("the object of a is %+v", object.ObjectMeta)
	}
	if own := objects[key("b").Name].OwnerReferences; own != nil {
		t.Errorf("b, whose pod's UID is not known, belongs to %v", own)
	}
	narrow, wide := table(t, c.server.Admin())
	if want := []string{
		"NAME SERVICE PORTS NODE HEALTH AGE",
		key("a").Name + " payments 5432=tcp,8080,9090=h2 n1 Draining",
		key("b").Name + " payments 5432=tcp,8080,9090=h2 n2 Healthy",
	}; !slices.Equal(narrow, want) {
		t.Errorf("kubectl get sep prints\n%s\nwant\n%s", strings.Join(narrow, "\n"), strings.Join(want, "\n"))
	}
	// One port of each that is not as its default port.
	if want := []string{
		"MESH NAME ADDRESS ACCOUNT PORTS THAT DIFFER",
		`payments.shop.aether.internal 10.1.0.1 checkout {"5432":"Draining","9090":"Unhealthy"}`,
		`payments.shop.aether.internal 10.1.0.1 checkout {"9090":"Unhealthy"}`,
	}; !slices.Equal(wide, want) {
		t.Errorf("kubectl get sep -o wide adds\n%s\nwant\n%s", strings.Join(wide, "\n"), strings.Join(want, "\n"))
	}

	must(t, n1.Withdraw(t.Context(), a.UID, 20))
	log2.AwaitUIDs(t, uidOf("b"))
	var deletions []string
	for _, text := range log2.Take() {
		if strings.HasPrefix(text, "delete") {
			deletions = append(deletions, text)
		}
	}
	if len(deletions) != 1 {
		t.Errorf("n2 was told %v", deletions)
	}
	c.awaitObjects(t, 1)
	if err := n2.Publish(t.Context(), endpoint("n1", "a", 30)); err == nil || !strings.Contains(err.Error(), `of node "n1"`) {
		t.Errorf("a record of another node: %v", err)
	}
}

// table returns what kubectl get prints, and what -o wide adds: header and rows without
// the age, sorted.
func table(t *testing.T, config *rest.Config) (narrow, wide []string) {
	t.Helper()
	httpClient, err := rest.HTTPClientFor(config)
	must(t, err)
	defer httpClient.CloseIdleConnections()
	req, err := http.NewRequest(http.MethodGet, config.Host+"/apis/endpoint.aether.io/v1alpha1/serviceendpoints", nil)
	must(t, err)
	req.Header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	resp, err := httpClient.Do(req)
	must(t, err)
	defer resp.Body.Close()
	var got metav1.Table
	must(t, json.NewDecoder(resp.Body).Decode(&got))
	columns := func(wanted func(priority int32) bool) []string {
		var header []string
		lines := make([][]string, len(got.Rows))
		for i, column := range got.ColumnDefinitions {
			if !wanted(column.Priority) {
				continue
			}
			header = append(header, strings.ToUpper(column.Name))
			for j, row := range got.Rows {
				if column.Name != "Age" {
					lines[j] = append(lines[j], fmt.Sprint(row.Cells[i]))
				}
			}
		}
		rows := make([]string, len(lines))
		for i, cells := range lines {
			rows[i] = strings.Join(cells, " ")
		}
		slices.Sort(rows)
		return append([]string{strings.Join(header, " ")}, rows...)
	}
	return columns(func(priority int32) bool { return priority == 0 }), columns(func(priority int32) bool { return priority > 0 })
}

// The life of a pod costs at most four writes, and a start of its registrar none:
// what the API server has already is not written again.
func TestWrites(t *testing.T) {
	c := newCluster(t)
	n1 := newNode(t, "n1", c.server.Admin())
	registrytest.Follow(t, n1).AwaitComplete(t)
	ep := endpoint("n1", "a", 1)
	for _, health := range []model.Health{model.Unhealthy, model.Healthy, model.Draining} {
		for i := range ep.Ports {
			ep.Ports[i].Health = health
		}
		ep.Generation++
		must(t, n1.Publish(t.Context(), ep))
		n1.settled(t)
	}
	ep.Generation++
	must(t, n1.Publish(t.Context(), ep)) // of another generation only
	n1.settled(t)
	// A write is counted with its answer, which the watch may overtake.
	await(t, "every write is counted", func() bool { return n1.writes(t) >= 3 })
	if got := n1.writes(t); got != 3 {
		t.Errorf("%v writes of three states", got)
	}
	n1.restart(t)
	log := registrytest.Follow(t, n1)
	log.AwaitComplete(t)
	must(t, n1.Retain(t.Context(), []string{ep.UID}))
	ep.Generation++
	must(t, n1.Publish(t.Context(), ep))
	log.AwaitGeneration(t, ep.UID, ep.Generation)
	n1.settled(t)
	must(t, n1.Withdraw(t.Context(), ep.UID, ep.Generation+1))
	c.awaitObjects(t, 0)
	n1.settled(t)
	deletes := func() float64 { return n1.value(t, "portolan_registry_api_writes_total", "verb=delete") }
	await(t, "the delete is counted", func() bool { return deletes() >= 1 })
	if applied, deleted := n1.value(t, "portolan_registry_api_writes_total", "verb=apply"), deletes(); applied != 0 || deleted != 1 {
		t.Errorf("after a restart %v were applied and %v deleted", applied, deleted)
	}
}

// While the API server is away everything goes on here, publishers do not wait, and
// what is known of other nodes is served, marked stale. When it is back both sides
// have everything, and of many changes only the newest is written.
func TestAway(t *testing.T) {
	c := newCluster(t)
	n1, n2 := newNode(t, "n1", c.server.Admin()), newNode(t, "n2", c.server.Admin())
	log1, log2 := registrytest.Follow(t, n1), registrytest.Follow(t, n2)
	for _, uid := range []string{"a", "gone"} {
		must(t, n1.Publish(t.Context(), endpoint("n1", uid, 1)))
	}
	must(t, n2.Publish(t.Context(), endpoint("n2", "b", 1)))
	log1.AwaitUIDs(t, uidOf("a"), uidOf("b"), uidOf("gone"))
	log2.AwaitUIDs(t, uidOf("a"), uidOf("b"), uidOf("gone"))
	n1.settled(t)
	await(t, "both writes are counted", func() bool { return n1.writes(t) == 2 }) // the watch can be told before the writer

	c.server.Stop(t)
	for g := range uint64(500) {
		ep := endpoint("n1", "a", g+2)
		ep.Weight = uint32(g + 2)
		must(t, n1.Publish(t.Context(), ep))
	}
	must(t, n1.Publish(t.Context(), endpoint("n1", "new", 1)))
	must(t, n1.Withdraw(t.Context(), uidOf("gone"), 2))
	must(t, n1.Publish(t.Context(), endpoint("n1", "short", 1)))
	must(t, n1.Withdraw(t.Context(), uidOf("short"), 2))
	log1.AwaitUIDs(t, uidOf("a"), uidOf("b"), uidOf("new"))
	log1.AwaitGeneration(t, uidOf("a"), 501)
	for _, n := range []*node{n1, n2} {
		await(t, "stale is told", func() bool { return n.value(t, "portolan_registry_stale") == 1 })
	}
	if err := n1.Health(); err == nil || !strings.Contains(err.Error(), "is away since") || !strings.Contains(err.Error(), "3 of this node wait") {
		t.Errorf("Health: %v", err)
	}
	log2.AwaitUIDs(t, uidOf("a"), uidOf("b"), uidOf("gone"))

	c.server.Restart(t)
	log2.AwaitUIDs(t, uidOf("a"), uidOf("b"), uidOf("new"))
	log2.AwaitGeneration(t, uidOf("a"), 501)
	log1.AwaitUIDs(t, uidOf("a"), uidOf("b"), uidOf("new"))
	for _, n := range []*node{n1, n2} {
		n.fresh(t)
		n.settled(t)
		if err := n.Health(); err != nil || n.value(t, "portolan_registry_stale") != 0 {
			t.Errorf("Health of %s: %v", n.name, err)
		}
		if text := n.log.String(); strings.Count(text, "the Kubernetes API is away") != 1 || strings.Contains(text, "still away") || strings.Count(text, "the Kubernetes API answers") < 1 {
			t.Errorf("the outage is not logged once:\n%s", text)
		}
	}
	c.awaitObjects(t, 3)
	await(t, "all writes are counted", func() bool { return n1.writes(t) >= 5 })
	if got := n1.writes(t) - 2; got != 3 {
		t.Errorf("500 changes of one record, one new one and one withdrawal took %v writes", got)
	}
}

// An API server that hangs holds up nobody (MESH-34).
func TestHangs(t *testing.T) {
	c := newCluster(t)
	n1, n2 := newNode(t, "n1", c.server.Admin()), newNode(t, "n2", c.server.Admin())
	log1, log2 := registrytest.Follow(t, n1), registrytest.Follow(t, n2)
	log1.AwaitComplete(t)
	log2.AwaitComplete(t)
	c.server.Pause(t)
	for i := range 3 * writers { // more than there are writers to wait with
		must(t, n1.Publish(t.Context(), endpoint("n1", fmt.Sprint(i), 1)))
	}
	log1.AwaitGeneration(t, uidOf(fmt.Sprint(3*writers-1)), 1)
	must(t, n1.Withdraw(t.Context(), uidOf("0"), 2))
	c.server.Resume(t)
	c.awaitObjects(t, 3*writers-1)
	log2.Await(t, "everything at the other node", func(view map[string]model.Endpoint, _ []string) bool {
		_, there := view[uidOf("0")]
		return len(view) == 3*writers-1 && !there
	})
}

// A registrar that starts while the API server is away serves what the last one had,
// marked stale, after a bounded wait; without a snapshot it serves nothing and says
// so. Then it catches up: changes, deletions, ghosts of its own, and what was never
// written (contract 4.8, XDS-42, XDS-43).
func TestStartAway(t *testing.T) {
	c := newCluster(t)
	n1, n2, empty := newNode(t, "n1", c.server.Admin()), newNode(t, "n2", c.server.Admin()), newNode(t, "n3", c.server.Admin())
	log1 := registrytest.Follow(t, n1)
	for _, uid := range []string{"mine", "ghost", "slow"} {
		must(t, n1.Publish(t.Context(), endpoint("n1", uid, 1)))
	}
	for _, uid := range []string{"changes", "goes"} {
		must(t, n2.Publish(t.Context(), endpoint("n2", uid, 1)))
	}
	all := []string{uidOf("mine"), uidOf("ghost"), uidOf("slow"), uidOf("changes"), uidOf("goes")}
	log1.AwaitUIDs(t, slices.Clone(all)...)
	n1.settled(t)
	n2.settled(t)
	for _, n := range []*node{n1, empty} {
		await(t, "the list is saved", func() bool { saved, err := n.snapshot.complete(); return saved && err == nil })
	}
	must(t, n1.Close())
	changes := endpoint("n2", "changes", 2)
	changes.Weight = 9
	must(t, n2.Publish(t.Context(), changes))
	must(t, n2.Withdraw(t.Context(), uidOf("goes"), 2))
	must(t, n2.Publish(t.Context(), endpoint("n2", "comes", 1)))
	n2.settled(t)
	must(t, empty.Close())
	must(t, empty.db.Update(func(tx *bbolt.Tx) error { return tx.DeleteBucket([]byte(bucketSnapshot)) }))

	c.server.Stop(t)
	n1.wait, empty.wait = 50*time.Millisecond, 50*time.Millisecond
	n1.start(t)
	empty.start(t)
	log1 = registrytest.Follow(t, n1)
	log1.AwaitComplete(t)
	log1.AwaitUIDs(t, slices.Clone(all)...)
	if err := n1.Health(); n1.value(t, "portolan_registry_stale") != 1 || err == nil || !strings.Contains(err.Error(), "may be outdated") {
		t.Errorf("Health: %v", err)
	}
	await(t, "that nothing is served is told", func() bool { return strings.Contains(empty.log.String(), "nothing is served until it answers") })
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := empty.Watch(ctx, func(ev registry.Event) { t.Errorf("without a list or snapshot there is %v", ev.Kind) }); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the watch ended with %v", err)
	}
	// What attach does at a start: it publishes, and says what is attached.
	must(t, n1.Publish(t.Context(), endpoint("n1", "mine", 2)))
	must(t, n1.Publish(t.Context(), endpoint("n1", "unwritten", 1)))
	must(t, n1.Retain(t.Context(), []string{uidOf("mine"), uidOf("unwritten"), uidOf("slow")}))
	log1.AwaitUIDs(t, uidOf("mine"), uidOf("unwritten"), uidOf("slow"), uidOf("changes"), uidOf("goes"))

	c.server.Restart(t)
	want := []string{uidOf("mine"), uidOf("unwritten"), uidOf("slow"), uidOf("changes"), uidOf("comes")}
	log1.AwaitUIDs(t, slices.Clone(want)...)
	log1.AwaitGeneration(t, uidOf("changes"), 2)
	c.awaitObjects(t, len(want))
	log3 := registrytest.Follow(t, empty)
	log3.AwaitUIDs(t, slices.Clone(want)...)
	n1.fresh(t)
	n1.settled(t)
	if err := n1.Health(); err != nil {
		t.Errorf("Health: %v", err)
	}
	if got := n1.value(t, "portolan_registry_ghosts_total"); got != 1 {
		t.Errorf("%v ghosts", got)
	}
	// A ghost that shows up later, as after a restored backup, goes as well; one that
	// is attached and slow stays until it speaks.
	late, err := objectOf(endpoint("n1", "late", 1), "")
	must(t, err)
	_, err = c.objects.apply(t.Context(), late)
	must(t, err)
	await(t, "the late ghost is gone", func() bool { return n1.value(t, "portolan_registry_ghosts_total") == 2 })
	c.awaitObjects(t, len(want))
	must(t, n1.Withdraw(t.Context(), uidOf("slow"), 1))
	c.awaitObjects(t, len(want)-1)
}

// A node whose connection was cut while records went and the API server forgot what
// it had told is told of everything by a new list (XDS-05, XDS-12).
func TestRelist(t *testing.T) {
	c := newCluster(t)
	wire := newCable(t, c.server.Admin())
	n1, n2 := newNode(t, "n1", c.server.Admin()), newNode(t, "n2", wire.config)
	log2 := registrytest.Follow(t, n2)
	for _, uid := range []string{"stays", "changes", "goes", "again"} {
		must(t, n1.Publish(t.Context(), endpoint("n1", uid, 1)))
	}
	log2.AwaitUIDs(t, uidOf("stays"), uidOf("changes"), uidOf("goes"), uidOf("again"))
	log2.Take()
	lists := n2.value(t, "portolan_registry_lists_total")
	wire.cut()
	changes := endpoint("n1", "changes", 2)
	changes.Weight = 9
	must(t, n1.Publish(t.Context(), changes))
	must(t, n1.Withdraw(t.Context(), uidOf("goes"), 2))
	must(t, n1.Withdraw(t.Context(), uidOf("again"), 2))
	c.awaitObjects(t, 2)
	other := endpoint("n1", "other", 1) // the address of what went
	must(t, n1.Publish(t.Context(), other))
	must(t, n1.Publish(t.Context(), endpoint("n1", "again", 3)))
	c.awaitObjects(t, 4)
	n1.settled(t)
	c.server.Restart(t) // with an empty watch cache: what was before cannot be told
	n1.fresh(t)
	wire.mend()
	log2.AwaitUIDs(t, uidOf("stays"), uidOf("changes"), uidOf("other"), uidOf("again"))
	log2.AwaitGeneration(t, uidOf("changes"), 2)
	log2.AwaitGeneration(t, uidOf("again"), 3)
	if got := n2.value(t, "portolan_registry_lists_total"); got <= lists {
		t.Errorf("it was told without a list: this test shows nothing")
	}
	for _, text := range log2.Take() {
		if text == "upsert "+uidOf("stays")+" 1" {
			t.Errorf("what did not change was told again")
		}
	}
}

// Who deletes or changes an object by hand is overruled by its owner, and every
// reader takes that; who deletes it again and again is answered later each time.
func TestPutBack(t *testing.T) {
	c := newCluster(t)
	n1, n2 := newNode(t, "n1", c.server.Admin()), newNode(t, "n2", c.server.Admin())
	log2 := registrytest.Follow(t, n2)
	must(t, n1.Publish(t.Context(), endpoint("n1", "a", 10)))
	log2.AwaitGeneration(t, uidOf("a"), 10)
	n1.settled(t)
	first := c.list(t)[key("a").Name]
	must(t, c.objects.delete(t.Context(), key("a"), first.UID))
	log2.AwaitGeneration(t, uidOf("a"), 11)
	if got := c.list(t)[key("a").Name]; got.UID == first.UID || got.Spec.NodeName != "n1" {
		t.Errorf("put back: %+v", got)
	}

	by := c.list(t)[key("a").Name]
	by.ManagedFields, by.ResourceVersion, by.UID = nil, "", ""
	by.APIVersion, by.Kind = v1alpha1.GroupVersion().String(), v1alpha1.Kind
	by.Spec.Service, by.Spec.Generation = "stolen", 100
	_, err := c.objects.apply(t.Context(), &by)
	must(t, err)
	// The second time it takes a second, so the hand is seen for that long.
	if got := log2.AwaitGeneration(t, uidOf("a"), 101); got.Service.Name != "payments" {
		t.Errorf("overruled with %+v", got)
	}
	n1.settled(t)
	// The owner's next change counts, although its generation is lower than the hand's.
	ep := endpoint("n1", "a", 12)
	ep.Weight = 9
	must(t, n1.Publish(t.Context(), ep))
	if got := log2.AwaitGeneration(t, uidOf("a"), 102); got.Weight != 9 {
		t.Errorf("the owner's change is %+v", got)
	}
	if got := n1.value(t, "portolan_registry_put_back_total"); got != 2 {
		t.Errorf("put back %v times", got)
	}
	n1.mu.Lock()
	defer n1.mu.Unlock()
	if o := n1.own[key("a")]; o.putBacks != 2 {
		t.Errorf("%d in a row", o.putBacks)
	}
}

// One object that cannot be read is named once, counted and left out; the others, and
// the ports of it that can be, are served (MESH-8).
func TestUnusable(t *testing.T) {
	c := newCluster(t)
	n1, n2 := newNode(t, "n1", c.server.Admin()), newNode(t, "n2", c.server.Admin())
	log2 := registrytest.Follow(t, n2)
	put := func(uid string, change func(*v1alpha1.ServiceEndpoint)) {
		t.Helper()
		object, err := objectOf(endpoint("n3", uid, 1), "")
		must(t, err)
		change(object)
		_, err = c.objects.apply(t.Context(), object)
		must(t, err)
	}
	bad := func(o *v1alpha1.ServiceEndpoint) { o.Spec.IP, o.Spec.Addresses = "224.0.0.1", nil }
	put("bad", bad)
	put("bad", func(o *v1alpha1.ServiceEndpoint) { bad(o); o.Spec.Weight = 3 })
	put("newer", func(o *v1alpha1.ServiceEndpoint) { o.Spec.Ports = "8080,9090=h3" })
	must(t, n1.Publish(t.Context(), endpoint("n1", "a", 1)))
	log2.AwaitUIDs(t, uidOf("a"), uidOf("newer"))
	if ports := log2.AwaitGeneration(t, uidOf("newer"), 1).Ports; len(ports) != 2 || ports[1].Protocol != port.Unknown {
		t.Errorf("an unknown protocol is %+v", ports)
	}
	await(t, "it is counted", func() bool { return n2.value(t, "portolan_registry_unusable_objects") == 1 })
	if text := n2.log.String(); strings.Count(text, "cannot be used and is left out") != 1 || strings.Count(text, "part of a ServiceEndpoint cannot be used") != 1 {
		t.Errorf("not named once each:\n%s", text)
	}
	if err := n2.Health(); err == nil || !strings.Contains(err.Error(), "1 ServiceEndpoints cannot be used") {
		t.Errorf("Health: %v", err)
	}
	// A record that was served and cannot be read any more is served no longer.
	put("turns", func(*v1alpha1.ServiceEndpoint) {})
	log2.AwaitGeneration(t, uidOf("turns"), 1)
	put("turns", bad)
	log2.AwaitUIDs(t, uidOf("a"), uidOf("newer"))
	put("bad", func(o *v1alpha1.ServiceEndpoint) { o.Spec.Generation = 2 })
	put("turns", func(o *v1alpha1.ServiceEndpoint) { o.Spec.Generation = 2 })
	log2.AwaitUIDs(t, uidOf("a"), uidOf("newer"), uidOf("bad"), uidOf("turns"))
	await(t, "none is left out", func() bool { return n2.value(t, "portolan_registry_unusable_objects") == 0 })
}

// A record of whatever node that has an address of the mesh's services is left out, by
// name, address, range and remedy: a call of that pod would be a call of a service.
func TestAddressOfAService(t *testing.T) {
	c := newCluster(t)
	n1 := newNode(t, "n1", c.server.Admin())
	log1 := registrytest.Follow(t, n1)
	put := func(uid string, generation uint64, addrs ...v1alpha1.Address) {
		t.Helper()
		object, err := objectOf(endpoint("n2", uid, generation), "")
		must(t, err)
		object.Spec.IP, object.Spec.Addresses = addrs[0], addrs
		_, err = c.objects.apply(t.Context(), object)
		must(t, err)
	}
	put("a", 1, "10.1.0.9")
	put("b", 1, "198.19.255.255")
	put("c", 1, "10.1.0.10", "fd70:6f72:746f::1")
	put("d", 1, "198.20.0.0", "fd70:6f72:746f:1::1")
	log1.AwaitUIDs(t, uidOf("a"), uidOf("d"))
	await(t, "two are left out", func() bool { return n1.value(t, "portolan_registry_unusable_objects") == 2 })
	for uid, want := range map[string]string{
		"b": "its address 198.19.255.255 is in 198.18.0.0/15, whose addresses are the mesh's services: node n2 must give pods addresses of another range",
		"c": "its address fd70:6f72:746f::1 is in fd70:6f72:746f::/64, ",
	} {
		line := slices.IndexFunc(strings.Split(n1.log.String(), "\n"), func(line string) bool {
			return strings.Contains(line, want) && strings.Contains(line, "object="+key(uid).String())
		})
		if line < 0 {
			t.Errorf("the log does not say of %s: %s\n%s", key(uid), want, n1.log.String())
		}
	}
	// One that was served goes, and comes back.
	put("a", 2, "198.18.0.1")
	log1.AwaitUIDs(t, uidOf("d"))
	put("a", 3, "10.1.0.9")
	log1.AwaitUIDs(t, uidOf("a"), uidOf("d"))
}

// A mesh that gets another trust domain serves no record of the former one: neither
// what a node saved, nor what it left in the API server, nor that of a node which runs
// with the former settings. Each is served again once it is of this mesh.
func TestTrustDomainChanges(t *testing.T) {
	c := newCluster(t)
	n1, n2 := newNode(t, "n1", c.server.Admin()), newNode(t, "n2", c.server.Admin())
	of := func(n *node, uid string, generation uint64) model.Endpoint {
		ep := endpoint(n.name, uid, generation)
		ep.Identity.TrustDomain = n.domain
		return ep
	}
	must(t, n1.Publish(t.Context(), of(n1, "a", 1)))
	must(t, n2.Publish(t.Context(), of(n2, "b", 1)))
	registrytest.Follow(t, n1).AwaitUIDs(t, uidOf("a"), uidOf("b"))
	log2 := registrytest.Follow(t, n2)
	log2.AwaitUIDs(t, uidOf("a"), uidOf("b"))
	n1.settled(t)
	n2.settled(t)

	n1.domain = "mesh.corp"
	n1.restart(t)
	log1 := registrytest.Follow(t, n1)
	log1.AwaitComplete(t)
	log1.AwaitUIDs(t)
	if text := n1.log.String(); !strings.Contains(text, "records=2 trust_domain=mesh.corp") ||
		!strings.Contains(text, "its trust domain is aether.internal, not this mesh's mesh.corp: the registrar of node n2 must run with the mesh's settings") {
		t.Errorf("what is left out is not named:\n%s", text)
	}
	if err := n1.Health(); err == nil || !strings.Contains(err.Error(), "2 ServiceEndpoints cannot be used") {
		t.Errorf("Health: %v", err)
	}
	must(t, n1.Publish(t.Context(), of(n1, "a", 2)))
	log1.AwaitUIDs(t, uidOf("a"))
	log2.AwaitUIDs(t, uidOf("b"))

	n2.domain = n1.domain
	n2.restart(t)
	must(t, n2.Publish(t.Context(), of(n2, "b", 2)))
	for _, n := range []*node{n1, n2} {
		registrytest.Follow(t, n).AwaitUIDs(t, uidOf("a"), uidOf("b"))
		n.settled(t)
		await(t, n.name+" is well", func() bool { return n.Health() == nil })
	}
}

// Of two objects that claim one UID the first keeps it, also one of this node, until
// it goes.
func TestClaims(t *testing.T) {
	c := newCluster(t)
	n1, n2 := newNode(t, "n1", c.server.Admin()), newNode(t, "n2", c.server.Admin())
	log1, log2 := registrytest.Follow(t, n1), registrytest.Follow(t, n2)
	must(t, n1.Publish(t.Context(), endpoint("n1", "a", 1)))
	log2.AwaitGeneration(t, uidOf("a"), 1)
	n1.settled(t)
	thief, err := objectOf(endpoint("n3", "a", 7), "")
	must(t, err)
	thief.Name, thief.Spec.Service = "thief", "stolen"
	_, err = c.objects.apply(t.Context(), thief)
	must(t, err)
	for _, n := range []*node{n1, n2} {
		await(t, n.name+" leaves the thief out", func() bool { return n.value(t, "portolan_registry_unusable_objects") == 1 })
	}
	n3 := newNode(t, "n4", c.server.Admin()) // which has both in one list
	log3 := registrytest.Follow(t, n3)
	log3.AwaitComplete(t)
	for _, log := range []*registrytest.Log{log1, log2, log3} {
		if got := log.AwaitGeneration(t, uidOf("a"), 1); got.Service.Name != "payments" {
			t.Errorf("served: %+v", got)
		}
	}
	must(t, n1.Withdraw(t.Context(), uidOf("a"), 2))
	if got := log2.AwaitGeneration(t, uidOf("a"), 7); got.Service.Name != "stolen" {
		t.Errorf("the one that waited: %+v", got)
	}
}

// A namespace that is gone or about to be ends the tries for its records, and nothing
// else.
func TestNamespaceGone(t *testing.T) {
	c := newCluster(t)
	n1 := newNode(t, "n1", c.server.Admin())
	c.namespace(t, "ending")
	object, err := objectOf(endpoint("n3", "blocker", 1), "")
	must(t, err)
	object.Namespace = "ending"
	_, err = c.objects.apply(t.Context(), object)
	must(t, err)
	must(t, c.admin.CoreV1().Namespaces().Delete(t.Context(), "ending", metav1.DeleteOptions{}))
	for i, namespace := range []string{"ending", "never"} {
		ep := endpoint("n1", namespace, 1)
		ep.Service.Namespace, ep.Identity.Namespace = namespace, namespace
		must(t, n1.Publish(t.Context(), ep))
		await(t, "it is refused", func() bool { return n1.value(t, "portolan_registry_refused") == float64(i+1) })
	}
	must(t, n1.Publish(t.Context(), endpoint("n1", "a", 1)))
	n1.settled(t)
	n1.retryNow()
	must(t, n1.Publish(t.Context(), endpoint("n1", "b", 1)))
	n1.settled(t)
	if got := n1.value(t, "portolan_registry_api_writes_total", "result=refused"); got != 2 {
		t.Errorf("%v tries for two records", got)
	}
	if err := n1.Health(); err == nil || !strings.Contains(err.Error(), "refuses 2 endpoints") {
		t.Errorf("Health: %v", err)
	}
	if got := len(n1.Snapshot()); got != 5 {
		t.Errorf("%d records are served here", got)
	}
}

// retryNow does what the end of an outage does.
func (n *node) retryNow() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.retryAll()
}

// Without the CRD, or without rights, everything here goes on, Health has the remedy,
// and what was published is written when it is set right.
func TestNotInstalled(t *testing.T) {
	c := newCluster(t)
	account := c.server.PodAccount(t, "portolan-system", "portolan-registrar", "n1")
	n1 := newNode(t, "n1", account)
	must(t, n1.Publish(t.Context(), endpoint("n1", "a", 1)))
	await(t, "the remedy is told", func() bool {
		err := n1.Health()
		return err != nil && strings.Contains(err.Error(), "bind the registrar's ServiceAccount to its ClusterRole")
	})
	c.install(t, "rbac/endpoints.yaml")
	c.awaitObjects(t, 1)
	registrytest.Follow(t, n1).AwaitUIDs(t, uidOf("a"))
	must(t, n1.Withdraw(t.Context(), uidOf("a"), 2))
	c.awaitObjects(t, 0)
	n1.fresh(t)
}

// Whatever two nodes do while the API server dies and the connection of one is cut,
// in the end both readers and the API server have what the publishers have, and no
// reader saw a generation go back.
func TestInterleavings(t *testing.T) {
	c := newCluster(t)
	wire := newCable(t, c.server.Admin())
	nodes := []*node{newNode(t, "n0", c.server.Admin()), newNode(t, "n1", wire.config)}
	logs := []*registrytest.Log{registrytest.Follow(t, nodes[0]), registrytest.Follow(t, nodes[1])}
	for i, log := range logs {
		log.AwaitComplete(t)
		// What an answer got lost for may be at the API server all the same.
		must(t, nodes[i].Retain(t.Context(), nil))
	}
	var publishing sync.WaitGroup
	wants := make([]map[string]model.Endpoint, len(nodes))
	for i, n := range nodes {
		wants[i] = map[string]model.Endpoint{}
		publishing.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			for g := uint64(1); g <= 600; g++ {
				ep := endpoint(n.name, fmt.Sprintf("%s-%d", n.name, random.IntN(8)), g)
				ep.Weight = 1 + uint32(g)
				var err error
				if random.IntN(4) == 0 {
					err = n.Withdraw(t.Context(), ep.UID, g)
					delete(wants[i], ep.UID)
				} else {
					err = n.Publish(t.Context(), ep)
					wants[i][ep.UID] = ep
				}
				if err != nil {
					t.Error(err)
				}
				time.Sleep(time.Duration(random.IntN(4)) * time.Millisecond)
			}
		})
	}
	for range 2 {
		wire.cut()
		c.server.Restart(t)
		wire.mend()
	}
	publishing.Wait()
	want := map[string]model.Endpoint{}
	for _, m := range wants {
		maps.Copy(want, m)
	}
	same := func(got model.Endpoint, want model.Endpoint) bool { // the owner may have had to outbid itself
		got.Generation = want.Generation
		return reflect.DeepEqual(got, want)
	}
	for i, log := range logs {
		log.Await(t, "what was published", func(view map[string]model.Endpoint, _ []string) bool {
			for uid, ep := range want {
				if !same(view[uid], ep) {
					return false
				}
			}
			return len(view) == len(want)
		})
		last := map[string]uint64{}
		for _, text := range log.Take() {
			var kind, uid string
			var generation uint64
			if n, _ := fmt.Sscan(text, &kind, &uid, &generation); n == 3 && kind == "upsert" {
				if generation <= last[uid] {
					t.Errorf("n%d saw generation %d of %s after %d", i, generation, uid, last[uid])
				}
				last[uid] = generation
			}
		}
	}
	c.awaitObjects(t, len(want))
	for _, object := range c.list(t) {
		got, _, err := recordOf(&object)
		must(t, err)
		if !same(got, want[got.UID]) {
			t.Errorf("the API server has %+v, want %+v", got, want[got.UID])
		}
	}
}
