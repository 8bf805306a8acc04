package attach

import (
	"cmp"
	"slices"
	"strings"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// maxMessage bounds the text of a problem, in bytes: that is what an event holds, and the
// status shows the same.
const maxMessage = 1024

// Problem is one thing that is wrong with a pod, in the words of the pod's event.
type Problem struct{ Reason, Message string }

// side is a side of a pod that can be wrong by itself. Who looks at a side says all that
// is wrong with it, and so takes back what is not wrong any more.
type side uint8

// The sides.
const (
	// sideWish is what annotations and labels ask for.
	sideWish side = iota
	// sideAdoption is that a pod which runs outside the mesh, and should not, is taken in.
	sideAdoption
	// sideListeners is who listens on the ports.
	sideListeners
	sides
)

// complaints are what is wrong with one pod now.
type complaints struct {
	namespace, name string
	about           [sides][]Problem
}

func (c *complaints) all() []Problem { return slices.Concat(c.about[:]...) }

// Outsider is a pod that is not attached and with which something is wrong, for people.
type Outsider struct {
	Namespace, Name string
	Problems        []Problem
}

// judge says what is wrong with one side of a pod. What is new is logged, and the pod's
// owner is told; what was mended is told again when it comes back.
func (m *Manager) judge(w model.Workload, about side, wrong ...Problem) {
	for _, p := range m.note(w, about, wrong...) {
		m.log.Warn("something is wrong with a pod", "pod", w.Ref(), "reason", p.Reason, "message", p.Message)
		if m.cfg.Reporter != nil {
			m.cfg.Reporter.Report(w, p.Reason, p.Message)
		}
	}
}

// note is judge that tells nobody: the status alone shows it. It returns what is new.
func (m *Manager) note(w model.Workload, about side, wrong ...Problem) (fresh []Problem) {
	for i, p := range wrong {
		if len(p.Message) > maxMessage {
			wrong[i].Message = strings.ToValidUTF8(p.Message[:maxMessage], "")
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c, ok := m.complaints[w.ObjectUID]
	if !ok && len(wrong) == 0 {
		return nil
	}
	if !ok {
		c = &complaints{namespace: w.Namespace, name: w.Name}
		m.complaints[w.ObjectUID] = c
	}
	for _, p := range wrong {
		if !slices.Contains(c.about[about], p) {
			fresh = append(fresh, p)
		}
	}
	c.about[about] = slices.Clone(wrong)
	if len(c.all()) == 0 {
		delete(m.complaints, w.ObjectUID)
	}
	return fresh
}

// noteMissed notes why pods that run outside the mesh cannot be taken in yet, where that
// is no fault of theirs. What they were told of already stands.
func (m *Manager) noteMissed(missed []model.Workload, why string) {
	for _, w := range missed {
		m.mu.Lock()
		c, ok := m.complaints[w.ObjectUID]
		told := ok && slices.ContainsFunc(c.about[sideAdoption], func(p Problem) bool { return p == cannotAdopt() || p.Reason == reasonInvalid })
		m.mu.Unlock()
		if w.Running && !told {
			m.note(w, sideAdoption, Problem{reasonUnmeshed, "the pod runs outside the mesh and is not taken in yet: " + why})
		}
	}
}

// clear takes back all that is wrong with a pod.
func (m *Manager) clear(w model.Workload) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.complaints, w.ObjectUID)
}

// forgetComplaints lets go of those about pods that are no more.
func (m *Manager) forgetComplaints(known map[string]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for uid := range m.complaints {
		if !known[uid] {
			delete(m.complaints, uid)
		}
	}
}

// Outsiders returns the pods that are not attached and with which something is wrong, by
// name. Of what is wrong with the others Status tells.
func (m *Manager) Outsiders() []Outsider {
	m.mu.Lock()
	defer m.mu.Unlock()
	attached := make(map[string]bool, len(m.pods))
	for _, a := range m.pods {
		attached[a.pod.UID] = true
	}
	var out []Outsider
	for uid, c := range m.complaints {
		if !attached[uid] {
			out = append(out, Outsider{Namespace: c.namespace, Name: c.name, Problems: c.all()})
		}
	}
	slices.SortFunc(out, func(a, b Outsider) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out
}
