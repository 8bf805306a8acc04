package kubernetes

import (
	"encoding/json"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
)

// scripted answers writes as a test says: what a real API server answers in moments
// that cannot be brought about. Its list is empty and its watch is silent.
type scripted struct {
	mu sync.Mutex
	// answers has what is answered to each write in turn; the last one for ever.
	answers []answer
	// got has the verb and weight of each write.
	got []string
}

// answer is an error, or a change of what the writer sent.
type answer struct {
	err    *apierrors.StatusError
	change func(*v1alpha1.ServiceEndpoint)
}

func (s *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	switch {
	case r.Method == http.MethodGet && r.FormValue("sendInitialEvents") != "":
		s.fail(w, apierrors.NewBadRequest("no streaming lists"))
	case r.Method == http.MethodGet && r.FormValue("watch") != "":
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	case r.Method == http.MethodGet:
		list := v1alpha1.ServiceEndpointList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}}
		list.APIVersion, list.Kind = v1alpha1.GroupVersion().String(), "ServiceEndpointList"
		_ = json.NewEncoder(w).Encode(list)
	default:
		s.write(w, r)
	}
}

func (s *scripted) write(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var object v1alpha1.ServiceEndpoint
	_ = json.NewDecoder(r.Body).Decode(&object)
	s.got = append(s.got, r.Method)
	a := s.answers[0]
	if len(s.answers) > 1 {
		s.answers = s.answers[1:]
	}
	if a.err != nil {
		s.fail(w, a.err)
		return
	}
	object.UID, object.ResourceVersion = "1", "10"
	if a.change != nil {
		a.change(&object)
	}
	_ = json.NewEncoder(w).Encode(object)
}

func (*scripted) fail(w http.ResponseWriter, err *apierrors.StatusError) {
	err.ErrStatus.APIVersion, err.ErrStatus.Kind = "v1", "Status"
	w.WriteHeader(int(err.ErrStatus.Code))
	_ = json.NewEncoder(w).Encode(err.ErrStatus)
}

func (s *scripted) writes() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.got, " ")
}

// scriptedNode is a node whose writes are answered so, and which has read that there is
// nothing yet.
func scriptedNode(t *testing.T, answers ...answer) (*scripted, *node) {
	t.Helper()
	script := &scripted{answers: answers}
	server := httptest.NewServer(script)
	t.Cleanup(server.Close)
	n := newNode(t, "n1", &rest.Config{Host: server.URL})
	t.Cleanup(func() { must(t, n.Close()) })
	n.fresh(t)
	return script, n
}

// What fails is tried again; what is refused is not, until there is something new to
// write; what the server makes something else of is no reason to write for ever.
func TestWriteErrors(t *testing.T) {
	resource := schema.GroupResource{Group: v1alpha1.Group, Resource: v1alpha1.Resource}
	unavailable := answer{err: apierrors.NewServiceUnavailable("etcd has no leader")}
	conflict := answer{err: apierrors.NewConflict(resource, "a", nil)}
	invalid := answer{err: apierrors.NewInvalid(schema.GroupKind{Group: v1alpha1.Group, Kind: v1alpha1.Kind}, "a", nil)}
	altered := answer{change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Service = "webhook" }}
	ok := answer{}
	for _, tt := range []struct {
		name      string
		answers   []answer
		want      string // the writes
		refused   float64
		withdrawn bool
		log       string
	}{
		{name: "unavailable", answers: []answer{unavailable, unavailable, ok}, want: "PATCH PATCH PATCH", log: "etcd has no leader"},
		{name: "conflict", answers: []answer{conflict, ok}, want: "PATCH PATCH"},
		{name: "invalid", answers: []answer{invalid}, want: "PATCH", refused: 1, log: "refuses a ServiceEndpoint"},
		{name: "altered", answers: []answer{altered}, want: "PATCH", refused: 1, log: "does an admission webhook match"},
		{name: "deletion", answers: []answer{ok, unavailable, conflict, ok}, withdrawn: true, want: "PATCH DELETE DELETE DELETE"},
		{name: "deletion of what is gone", answers: []answer{ok, {err: apierrors.NewNotFound(resource, "a")}}, withdrawn: true, want: "PATCH DELETE"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			script, n := scriptedNode(t, tt.answers...)
			must(t, n.Publish(t.Context(), endpoint("n1", "a", 1)))
			if tt.withdrawn {
				await(t, "it is written", func() bool { return n.writes(t) == 1 })
				must(t, n.Withdraw(t.Context(), uidOf("a"), 2))
			}
			await(t, "the writes "+tt.want, func() bool { return script.writes() == tt.want })
			n.settled(t)
			await(t, "refused", func() bool { return n.value(t, "portolan_registry_refused") == tt.refused })
			n.retryNow()
			if n.queue.Len() != 0 || script.writes() != tt.want {
				t.Errorf("it goes on: %s", script.writes())
			}
			if text := n.log.String(); strings.Contains(text, "away") {
				t.Errorf("an API server without streaming lists is called away:\n%s", text)
			}
			if !strings.Contains(n.log.String(), tt.log) {
				t.Errorf("the log does not say %q:\n%s", tt.log, n.log)
			}
			if tt.refused == 0 {
				return
			}
			script.mu.Lock()
			script.answers = []answer{ok}
			script.mu.Unlock()
			ep := endpoint("n1", "a", 2)
			ep.Weight = 9
			must(t, n.Publish(t.Context(), ep))
			await(t, "the next state is written", func() bool { return script.writes() == tt.want+" PATCH" })
			n.settled(t)
			if n.value(t, "portolan_registry_refused") != 0 {
				t.Errorf("it still counts as refused")
			}
		})
	}
}

// What is refused is tried again at a slow pace, also after another try was put off, and
// said once: who mends a policy of the cluster does not tell the registrar of it.
func TestRefusedIsTriedAgain(t *testing.T) {
	kyverno := answer{err: apierrors.NewBadRequest("a policy of the cluster")}
	altered := answer{change: func(o *v1alpha1.ServiceEndpoint) { o.Spec.Service = "webhook" }}
	for name, bad := range map[string]answer{"refused": kyverno, "altered": altered} {
		t.Run(name, func(t *testing.T) {
			script, n := scriptedNode(t, bad)
			n.mu.Lock()
			n.refusedPause = 20 * time.Millisecond
			n.mu.Unlock()
			tries := func() int { return len(strings.Fields(script.writes())) }
			errors := func() int { return strings.Count(n.log.String(), "level=ERROR") }
			for i := range 2 { // the second state moves the next try
				ep := endpoint("n1", "a", uint64(i+1))
				ep.Weight = uint32(i + 1)
				must(t, n.Publish(t.Context(), ep))
				await(t, "it is said", func() bool { return errors() == i+1 })
				before := tries()
				await(t, "it is tried again", func() bool { return tries() >= before+3 })
				if n.value(t, "portolan_registry_refused") != 1 || errors() != i+1 {
					t.Errorf("said %d times of %d states:\n%s", errors(), i+1, n.log)
				}
			}
			script.mu.Lock()
			script.answers = []answer{{}}
			script.mu.Unlock()
			await(t, "it is taken", func() bool { return n.value(t, "portolan_registry_refused") == 0 })
			n.settled(t)
		})
	}
}

// A pod comes back while its object is still being deleted, as one with a finalizer is:
// what is written into it counts for nothing, and is written again once it is gone.
func TestWriteIntoWhatIsBeingDeleted(t *testing.T) {
	script, n := scriptedNode(t, answer{})
	must(t, n.Publish(t.Context(), endpoint("n1", "a", 1)))
	n.settled(t)
	must(t, n.Withdraw(t.Context(), uidOf("a"), 2))
	await(t, "the deletion is taken", func() bool { return n.writes(t) == 2 })
	n.settled(t)
	must(t, n.Publish(t.Context(), endpoint("n1", "a", 3)))
	await(t, "it is written", func() bool { return n.writes(t) == 3 })
	if n.value(t, "portolan_registry_refused") != 0 || strings.Contains(n.log.String(), "webhook") {
		t.Errorf("an object that is being deleted counts as refused:\n%s", n.log)
	}
	object, err := objectOf(endpoint("n1", "a", 1), "")
	must(t, err)
	object.UID, object.ResourceVersion = "1", "11"
	n.vanished(key("a"), object)
	await(t, "it is written again", func() bool { return script.writes() == "PATCH DELETE PATCH PATCH" })
	n.settled(t)
}

// When the mesh is taken out of the cluster its objects, and the right to write them, go:
// that is said once, nothing is put back, and nothing is called wrong. A mesh that stays
// after all has its next change written.
func TestLeaving(t *testing.T) {
	resource := schema.GroupResource{Group: v1alpha1.Group, Resource: v1alpha1.Resource}
	forbidden := answer{err: apierrors.NewForbidden(resource, "a", nil)}
	terminating := answer{err: apierrors.NewMethodNotSupported(resource, "create")}
	script, n := scriptedNode(t, answer{}, answer{}, forbidden, terminating, answer{})
	for _, uid := range []string{"a", "b"} {
		must(t, n.Publish(t.Context(), endpoint("n1", uid, 1)))
	}
	n.settled(t)
	before := n.log.String()
	n.leaving.Store(true)
	for _, uid := range []string{"a", "b"} {
		object, err := objectOf(endpoint("n1", uid, 1), "")
		must(t, err)
		object.UID, object.ResourceVersion = "1", "11"
		n.vanished(key(uid), object)
	}
	n.answered(t.Context(), apierrors.NewForbidden(resource, "", nil))
	n.answered(t.Context(), apierrors.NewNotFound(resource, ""))
	if n.queue.Len() != 0 || script.writes() != "PATCH PATCH" || n.value(t, "portolan_registry_put_back_total") != 0 {
		t.Errorf("put back: %s", script.writes())
	}
	changed := endpoint("n1", "a", 2)
	changed.Weight++
	must(t, n.Publish(t.Context(), changed))
	await(t, "it is tried, and then written", func() bool { return n.writes(t) == 3 })
	said := strings.TrimPrefix(n.log.String(), before)
	if strings.Count(said, "the mesh is being removed") != 1 || strings.Contains(said, "level=WARN") || strings.Contains(said, "level=ERROR") {
		t.Errorf("the log says:\n%s", said)
	}
	n.leaving.Store(false)
	object, err := objectOf(changed, "")
	must(t, err)
	object.UID, object.ResourceVersion = "1", "12"
	n.vanished(key("a"), object)
	await(t, "it is put back", func() bool { return n.writes(t) == 4 })
}

// A generation that no clock gives does not count: its owner writes over it, also when
// nothing else is wrong, with one that everybody takes; readers leave it out until then. At
// the highest that counts the owner says what is wrong.
func TestGenerationIsMadeUp(t *testing.T) {
	for _, tt := range []struct {
		name       string
		generation int64
		weight     int32
		want       int64 // what is written; 0: nothing
	}{
		{"the highest number", math.MaxInt64, 9, 6},
		{"the highest number alone", math.MaxInt64, 0, 6},
		{"beyond the last that counts", maxGeneration + 1, 9, 6},
		{"the last but one that counts", maxGeneration - 1, 9, maxGeneration},
		{"the last that counts", maxGeneration, 9, 0},
		{"the last that counts, alone", maxGeneration, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			written := make(chan int64, 9)
			script := &scripted{answers: []answer{{}, {change: func(o *v1alpha1.ServiceEndpoint) {
				o.ResourceVersion = "12"
				written <- o.Spec.Generation
			}}}}
			server := httptest.NewServer(script)
			defer server.Close()
			owner := newNode(t, "n1", &rest.Config{Host: server.URL})
			defer func() { must(t, owner.Close()) }()
			reader := newNode(t, "n2", &rest.Config{Host: server.URL})
			defer func() { must(t, reader.Close()) }()
			owner.fresh(t)
			reader.fresh(t)
			must(t, owner.Publish(t.Context(), endpoint("n1", "a", 5)))
			owner.settled(t)
			see := func(generation int64, weight int32) *v1alpha1.ServiceEndpoint {
				object, err := objectOf(endpoint("n1", "a", 5), owner.meshName(endpoint("n1", "a", 5).Service))
				must(t, err)
				object.UID, object.ResourceVersion, object.Spec.Generation = "1", "11", generation
				if weight != 0 {
					object.Spec.Weight = weight
				}
				return object
			}
			reader.seen(key("a"), see(5, 0))
			if reader.local.Stats().Records != 1 {
				t.Fatal("the reader does not have the record")
			}
			reader.seen(key("a"), see(tt.generation, tt.weight))
			if got, want := reader.local.Stats().Records == 1, tt.generation <= maxGeneration; got != want {
				t.Errorf("the reader takes it: %v, want %v", got, want)
			}
			owner.seen(key("a"), see(tt.generation, tt.weight))
			owner.settled(t)
			if tt.want == 0 {
				refused := float64(0)
				if tt.weight != 0 {
					refused = 1
				}
				if len(written) != 0 || owner.value(t, "portolan_registry_refused") != refused || strings.Contains(owner.log.String(), "start its pod anew") != (refused == 1) {
					t.Errorf("%d writes; log:\n%s", len(written), owner.log)
				}
				return
			}
			await(t, "it is written anew", func() bool { return len(written) > 0 })
			if got := <-written; got != tt.want {
				t.Errorf("generation %d is written, want %d", got, tt.want)
			}
			if reader.seen(key("a"), see(tt.want, 0)); reader.local.Stats().Records != 1 {
				t.Errorf("the reader does not take generation %d:\n%s", tt.want, reader.log)
			}
		})
	}
}

// A record that changes and changes back while the first change is being written is
// written again at once: what our own write made of the object is nobody else's doing.
func TestChangesBackDuringWrite(t *testing.T) {
	begun, release := make(chan struct{}), make(chan struct{})
	_, n := scriptedNode(t, answer{}, answer{change: func(*v1alpha1.ServiceEndpoint) { close(begun); <-release }}, answer{})
	must(t, n.Publish(t.Context(), endpoint("n1", "a", 1)))
	n.settled(t)
	changed := endpoint("n1", "a", 2)
	changed.Weight++
	must(t, n.Publish(t.Context(), changed))
	await(t, "the second write begins", func() bool {
		select {
		case <-begun:
			return true
		default:
			return false
		}
	})
	must(t, n.Publish(t.Context(), endpoint("n1", "a", 3)))
	close(release)
	await(t, "three writes", func() bool { return n.writes(t) == 3 })
	n.settled(t)
	if got := n.value(t, "portolan_registry_put_back_total"); got != 0 {
		t.Errorf("our own write was put back %v times:\n%s", got, n.log)
	}
}
