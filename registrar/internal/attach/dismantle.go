package attach

import (
	"errors"
	"io/fs"
	"os"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Dismantle takes the mesh off this node for good: every pod goes on without its
// capture, and no pin keeps a network namespace, since no DEL will come for them once
// the plugin is out of the chain. The spool and the marker of the run go as well. Call it
// when the plugin is out of the chain, nothing else runs any more and no ADD is served; of
// a Manager that does nothing else, Config needs only the DB, the log, the folders and
// Capture. It does all that it can; the error has the rest.
func (m *Manager) Dismantle() error {
	pods := m.Pods()
	keys := make([]model.AttachmentKey, 0, len(pods))
	var errs []error
	for _, p := range pods {
		keys = append(keys, p.Key)
		errs = append(errs, m.cfg.Capture.Remove(p), m.cfg.Capture.Unpin(p.Key))
	}
	for _, e := range m.scan(m.cfg.NetnsDir) {
		if req := e.Note.GetAttached(); req != nil {
			key := model.KeyOf(req.GetAttachment())
			errs = append(errs, m.cfg.Capture.Remove(model.Pod{Key: key, Netns: req.GetNetns()}), m.cfg.Capture.Unpin(key))
		}
	}
	if err := os.Remove(m.marker()); !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	errs = append(errs, os.RemoveAll(m.cfg.SpoolDir), m.store.remove(keys...))
	m.log.Info("mesh taken off the node's pods, which go on without it", "pods", len(pods))
	return errors.Join(errs...)
}
