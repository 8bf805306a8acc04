package attach

import "github.com/portolan-mesh/portolan/registrar/internal/model"

// complain logs what is wrong with a pod and tells its owner; the same thing once.
func (m *Manager) complain(w model.Workload, reason, message string) {
	m.mu.Lock()
	again := m.complaints[w.ObjectUID] == message
	m.complaints[w.ObjectUID] = message
	m.mu.Unlock()
	if again {
		return
	}
	m.log.Warn("something is wrong with a pod", "pod", w.Ref(), "reason", reason, "message", message)
	if m.cfg.Reporter != nil {
		m.cfg.Reporter.Report(w, reason, message)
	}
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
