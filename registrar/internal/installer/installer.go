package installer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// settle is how long notices are gathered, so that a file that is being written
	// in place is read once it is whole.
	settle = 20 * time.Millisecond
	// takeover is how long our entry may be missing before an instance that was
	// replaced takes over: a living owner repairs sooner.
	takeover = 2 * maxDelay
	// orphanGrace is how long an owned list stays without the file that it was made
	// from: a primary that removes its file and makes it again needs less.
	orphanGrace = 10 * time.Second
	// removalTimeout bounds the question whether we are removed for good.
	removalTimeout = 3 * time.Second
)

// Installer keeps the plugin installed on one node.
type Installer struct {
	cfg     Config
	entry   []byte
	log     *slog.Logger
	metrics metrics
	watch   watch

	// The fields below belong to the goroutine of Run, or the caller of Install.

	claimed bool
	// chained is whether our entry has ever been in place; owned is the owned list
	// as it was left.
	chained bool
	owned   string
	pace    pace
	// replaced is the foreign file that was replaced last; nil when it is settled.
	replaced *replaced
	// missing and orphaned are since when the entry, or the source of the owned
	// list, has been missing; zero when it is not.
	missing, orphaned time.Time
	// binary is how source and target looked when they were the same.
	binary [2]fs.FileInfo

	mu    sync.Mutex
	state State // guarded by mu
}

// New makes an Installer; nothing is changed yet.
func New(cfg Config) (*Installer, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	entry, err := cfg.Entry.JSON()
	if err != nil {
		return nil, err
	}
	if cfg.NewWatcher == nil {
		cfg.NewWatcher = fsnotify.NewWatcher
	}
	i := &Installer{cfg: cfg, entry: entry, log: cfg.Log, state: State{Problem: "the installer has not run yet"}}
	if err := i.metrics.register(cfg.Metrics); err != nil {
		return nil, err
	}
	i.watch = watch{dirs: []string{cfg.ConfDir, cfg.BinDir}, open: cfg.NewWatcher, errs: i.metrics.watchErrors, log: cfg.Log}
	return i, nil
}

// State returns what was found at the last look. Any goroutine may call it.
func (i *Installer) State() State {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.state
}

// Install installs once and returns what it left.
func (i *Installer) Install(ctx context.Context) State {
	i.step(ctx)
	return i.State()
}

// Run installs and repairs until ctx ends. Then it uninstalls if the mesh is
// certainly removed from the node and no newer instance has taken over; in all
// other cases everything stays: a registrar that comes back finds its pods meshed
// (CNI-D7). The caller keeps the plugin's socket open until Run returned.
func (i *Installer) Run(ctx context.Context) error {
	defer func() {
		i.watch.close()
		i.replaced.close()
	}()
	t := time.NewTimer(0)
	defer t.Stop()
	settling := false // the timer must not be put off by each notice of many
	for {
		select {
		case <-ctx.Done():
			return i.leave(ctx)
		case e, ok := <-i.watch.events():
			if ok && !settling && i.relevant(e) {
				settling = true
				t.Reset(settle)
			}
			continue
		case err := <-i.watch.errors():
			i.watch.failedWith(i.cfg.Now(), err)
		case <-t.C:
		}
		settling = false
		_ = i.makeFolders()         // step says what fails
		i.watch.ensure(i.cfg.Now()) // before looking: what changes afterwards is told
		t.Reset(i.step(ctx))
	}
}

// relevant reports whether an event can concern us. The folders themselves and our
// binary do; of a configuration folder every file that a runtime loads.
func (i *Installer) relevant(e fsnotify.Event) bool {
	switch e.Name {
	case i.cfg.ConfDir, i.cfg.BinDir, i.target():
		return true
	}
	return filepath.Dir(e.Name) == i.cfg.ConfDir && isConf(e.Name)
}

func (i *Installer) target() string { return filepath.Join(i.cfg.BinDir, PluginType) }

// step makes everything as it must be and returns when to look again.
func (i *Installer) step(ctx context.Context) time.Duration {
	var p plan
	err := i.locked(ctx, func(m *marker) error {
		owner, err := i.owner(m)
		if err != nil {
			return err
		}
		// The binary first: an entry without it fails every ADD and DEL.
		var missing error
		if owner {
			missing = i.placeBinary()
		}
		p, err = i.place(owner && missing == nil)
		return errors.Join(missing, err)
	})
	if ctx.Err() != nil {
		return i.cfg.Poll // what failed failed for that
	}
	if err != nil {
		i.metrics.errors.Inc()
		if p.file == "" { // who cannot write can still look
			p, _ = i.place(false)
		}
		p.problem = errors.Join(err, p.problem)
	}
	i.publish(p)
	if p.wait > 0 {
		return min(p.wait, i.cfg.Poll)
	}
	return i.cfg.Poll
}

// makeFolders makes the folders that are missing.
func (i *Installer) makeFolders() error {
	for _, dir := range []string{i.cfg.ConfDir, i.cfg.BinDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // G301: runtimes of other users look into them
			return err
		}
	}
	return nil
}

// locked makes the folders and runs fn with the marker.
func (i *Installer) locked(ctx context.Context, fn func(*marker) error) error {
	if err := i.makeFolders(); err != nil {
		return err
	}
	m, err := lockMarker(ctx, i.cfg.ConfDir)
	if err != nil {
		return err
	}
	defer m.unlock()
	return fn(m)
}

// owner reports whether this instance may write, and claims the folder when it
// starts, when nobody has it, and when its owner is gone.
func (i *Installer) owner(m *marker) (bool, error) {
	switch {
	case i.cfg.Instance == "": // by hand
		return true, nil
	case m.owner == i.cfg.Instance:
		return true, nil
	case i.claimed && m.owner != "" && (i.missing.IsZero() || i.cfg.Now().Sub(i.missing) < takeover):
		return false, nil
	}
	if !i.claimed {
		if err := errors.Join(removeTemporary(i.cfg.ConfDir), removeTemporary(i.cfg.BinDir)); err != nil {
			i.log.Warn("unfinished files of an earlier installer are left", "error", err)
		}
	}
	if err := m.claim(i.cfg.Instance); err != nil {
		return false, fmt.Errorf("claim %s: %w", m.file.Name(), err)
	}
	i.claimed = true
	return true, nil
}

// placeBinary puts the plugin's binary in place. Looking is cheap while nothing
// changed.
func (i *Installer) placeBinary() error {
	if i.binary[0] != nil && sameFile(i.cfg.Source, i.binary[0]) && sameFile(i.target(), i.binary[1]) {
		return nil
	}
	copied, err := copyBinary(i.cfg.Source, i.target())
	if err != nil {
		return fmt.Errorf("install %s: %w", i.target(), err)
	}
	if copied {
		i.metrics.copies.Inc()
		i.log.Info("plugin installed", "path", i.target())
	}
	source, errS := os.Stat(i.cfg.Source)
	target, errT := os.Lstat(i.target())
	if err := errors.Join(errS, errT); err != nil {
		return err
	}
	i.binary = [2]fs.FileInfo{source, target}
	return nil
}

// sameFile reports whether path looks as it did.
func sameFile(path string, was fs.FileInfo) bool {
	now, err := os.Stat(path)
	return err == nil && os.SameFile(was, now) && now.Size() == was.Size() && now.ModTime().Equal(was.ModTime()) && now.Mode() == was.Mode()
}

// publish tells everybody what was found, and the log what is new.
func (i *Installer) publish(p plan) {
	s := State{Chained: p.chained, File: p.file}
	if p.problem != nil {
		s.Problem = p.problem.Error()
	}
	if i.watch.why != nil {
		s.Watch = i.watch.why.Error()
	}
	i.mu.Lock()
	old := i.state
	i.state = s
	i.mu.Unlock()
	if s.Problem != old.Problem || s.Chained != old.Chained || s.File != old.File {
		if s.Problem != "" {
			i.log.Warn("CNI chain is not as it should be", "file", s.File, "chained", s.Chained, "problem", s.Problem)
		} else {
			i.log.Info("plugin is in the CNI chain", "file", s.File)
		}
	}
	i.metrics.chained.Set(0)
	if s.Chained {
		i.metrics.chained.Set(1)
	}
}
