package installer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// leave is the end of Run.
func (i *Installer) leave(ctx context.Context) error {
	if i.cfg.Removal == nil {
		return nil
	}
	// ctx has ended; what follows has a bound of its own.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removalTimeout+lockTimeout)
	defer cancel()
	ask, stop := context.WithTimeout(ctx, removalTimeout)
	removed, err := i.cfg.Removal.Removed(ask)
	stop()
	switch {
	case err != nil:
		i.log.Info("plugin stays in the CNI chain: it is not certain that the mesh is removed", "error", err)
		return nil
	case !removed:
		i.log.Info("plugin stays in the CNI chain: the mesh is not removed from this node")
		return nil
	}
	return i.locked(ctx, func(m *marker) error {
		if m.owner != i.cfg.Instance {
			i.log.Info("plugin stays in the CNI chain: another instance has it", "instance", m.owner)
			return nil
		}
		changes, err := clean(i.cfg.ConfDir)
		for _, c := range changes {
			i.log.Info("plugin removed from the CNI chain", "file", c.File, "change", c.What)
		}
		if err != nil {
			return err
		}
		i.metrics.chained.Set(0)
		i.mu.Lock()
		i.state = State{Removed: true}
		i.mu.Unlock()
		return m.remove()
	})
}

// Change is one thing that uninstalling did, or found and left.
type Change struct {
	// File is the path, What is what happened to it, for people.
	File, What string
}

// Uninstall takes our entry out of every configuration in confDir, whoever put it
// there, and removes owned lists. The binary stays: runtimes call it for DEL of pods
// that were added with it, and it succeeds without a registrar (CNI-9). A file that
// cannot be read is left and is part of the error.
func Uninstall(ctx context.Context, confDir string) ([]Change, error) {
	if _, err := os.Stat(confDir); err != nil {
		return nil, fmt.Errorf("configuration folder: %w", err)
	}
	m, err := lockMarker(ctx, confDir)
	if err != nil {
		return nil, err
	}
	defer m.unlock()
	changes, err := clean(confDir)
	return changes, errors.Join(err, m.remove())
}

// cleanTries is how often a file that changes under our hands is tried.
const cleanTries = 10

// clean removes what is ours from the configuration folder.
func clean(dir string) ([]Change, error) {
	files, err := scan(dir)
	if err != nil {
		return nil, err
	}
	var changes []Change
	var errs []error
	// Foreign files first: the runtime must not fall back to one that still has us.
	for _, owned := range []bool{false, true} {
		for _, f := range files {
			if f.owned != owned || !owned && !f.list {
				continue
			}
			path := filepath.Join(dir, f.name)
			what, err := cleanFile(path, owned)
			switch {
			case err != nil:
				errs = append(errs, fmt.Errorf("%s: %w", path, err))
			case what != "":
				changes = append(changes, Change{File: path, What: what})
			}
		}
	}
	return changes, errors.Join(errs...)
}

// cleanFile removes what is ours from one file and says what it did, "" for nothing.
func cleanFile(path string, owned bool) (string, error) {
	if owned {
		return "removed: it was ours", os.Remove(path)
	}
	for range cleanTries {
		old, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return "", nil
		}
		if err != nil {
			return "", err
		}
		if !bytes.Contains(old, []byte(PluginType)) {
			return "", nil // also when it cannot be parsed
		}
		text, err := Remove(old)
		if err != nil {
			return "", err
		}
		if bytes.Equal(old, text) {
			return "", nil
		}
		if err := replaceConf(path, old, text); !errors.Is(err, errChanged) {
			return "entry removed", err
		}
	}
	return "", errChanged
}

// RemoveBinary removes the plugin's binary. DEL of pods that were added with it
// then fails, and they stay in Terminating (CNI-9).
func RemoveBinary(binDir string) (Change, error) {
	path := filepath.Join(binDir, PluginType)
	return Change{File: path, What: "removed"}, os.Remove(path)
}
