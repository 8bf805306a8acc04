package model

import (
	"time"

	"github.com/portolan-mesh/portolan/api/annotation"
)

// MirrorGrace is how long a static pod whose mirror is not there counts as it was: its
// containers go on, and the kubelet makes another mirror when it looks at the pod next,
// which is a minute and a half later at most.
const MirrorGrace = 2 * time.Minute

// DefaultAccount is the ServiceAccount of a pod that names none, as the API server fills it
// in. The mirror of a static pod names none.
const DefaultAccount = "default"

// Ending says how far a pod of the orchestrator is on its way out.
type Ending uint8

// The stages, in order.
const (
	// Living: nothing says that the pod ends.
	Living Ending = iota
	// Terminating: it has a deletion time; what is in flight may finish (contract 4.6).
	Terminating
	// Finished: all its containers ended for good (phase Succeeded or Failed), or
	// its object is gone. It keeps its address until DEL, but serves nobody (CNI-37).
	Finished
)

// String returns the lower-case name.
func (e Ending) String() string {
	switch e {
	case Living:
		return "living"
	case Terminating:
		return "terminating"
	case Finished:
		return "finished"
	}
	return "unknown"
}

// Workload is what the orchestrator knows of one pod of this node. Identity and
// readiness come from here, never from an annotation.
type Workload struct {
	// Namespace, Name and UID are the pod's; UID is the one that the runtime is
	// told, which for a static pod is not that of its API object.
	Namespace, Name, UID string
	// ObjectUID is that of the API object.
	ObjectUID string
	// Account is the pod's ServiceAccount.
	Account string
	// Annotations are those under the mesh's prefixes, as they are now.
	Annotations map[string]string
	// Word is what labels say on joining: the pod's own, else its namespace's.
	Word annotation.Managed
	// WordProblem says what is wrong with a label of that name.
	WordProblem string
	// HostNetwork pods have no network namespace of their own: they cannot join.
	HostNetwork bool
	// Running: a container of it was started, so the runtime has set up its network.
	Running bool
	// Ready is the pod's Ready condition.
	Ready bool
	// Ending says how far it is on its way out.
	Ending Ending
}

// Ref returns namespace/name.
func (w Workload) Ref() string { return w.Namespace + "/" + w.Name }
