package installer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// plan is what one look at the configuration folder found and did.
type plan struct {
	// file is what the runtime loads, chained whether our entry is in it.
	file    string
	chained bool
	problem error
	// wait is when to look again at the latest; 0 is at the next poll.
	wait time.Duration
}

// folder is the configuration folder as one look saw it.
type folder struct {
	// files that are foreign, in the runtime's order; own are owned lists.
	files, own []confFile
	// source is the first foreign file that our entry can go into.
	source *confFile
	// broken is the first file that a runtime stumbles over before that.
	broken *confFile
}

// look reads the configuration folder.
func look(dir string) (folder, error) {
	all, err := scan(dir)
	var f folder
	for n := range all {
		c := &all[n]
		switch {
		case c.owned:
			f.own = append(f.own, *c)
			continue
		case c.unusable == nil && !c.loopback && f.source == nil:
			f.source = c
		case c.unusable != nil && f.source == nil && f.broken == nil:
			f.broken = c
		}
		f.files = append(f.files, *c)
	}
	return f, err
}

// loaded is the first file of the folder in the runtime's order. A lone loopback
// counts for nothing.
func (f folder) loaded() *confFile {
	all := slices.Concat(f.own, f.files)
	slices.SortFunc(all, func(a, b confFile) int {
		if a.name < b.name {
			return -1
		}
		return 1
	})
	for n := range all {
		if !all[n].loopback {
			return &all[n]
		}
	}
	return nil
}

// place looks at the configurations and, for an owner, makes them right.
func (i *Installer) place(owner bool) (plan, error) {
	if owner {
		if err := i.catchUp(); err != nil {
			return plan{}, err
		}
	}
	f, err := look(i.cfg.ConfDir)
	if err != nil {
		return plan{}, err
	}
	var p plan
	if owner {
		p.wait, err = i.repair(f)
		if err != nil {
			p.problem = err
			if p.wait == 0 { // else it was not tried
				i.metrics.errors.Inc()
			}
			if errors.Is(err, errChanged) {
				p.wait = settle
			}
		}
		if f, err = look(i.cfg.ConfDir); err != nil {
			return p, err
		}
	}
	i.judge(f, &p)
	return p, nil
}

// judge says what the runtime makes of the folder.
func (i *Installer) judge(f folder, p *plan) {
	if first := f.loaded(); first != nil {
		p.file = filepath.Join(i.cfg.ConfDir, first.name)
		p.chained = first.chained()
	}
	switch {
	case f.broken != nil && !p.chained:
		p.problem = errors.Join(p.problem, fmt.Errorf("%s: %w (the runtime loads it first, no pod can start)",
			filepath.Join(i.cfg.ConfDir, f.broken.name), f.broken.unusable))
	case p.chained:
	case f.source == nil:
		p.problem = errors.Join(p.problem, fmt.Errorf("%s has no network configuration that the plugin can be chained to: install the primary CNI plugin", i.cfg.ConfDir))
	case p.problem == nil:
		p.problem = fmt.Errorf("%s lacks the plugin's entry", p.file)
	}
	switch {
	case p.chained || f.source == nil:
		i.missing = time.Time{}
	case i.missing.IsZero():
		i.missing = i.cfg.Now()
	}
	i.chained = i.chained || p.chained
	i.owned = ""
	if len(f.own) > 0 {
		i.owned = f.own[0].name
	}
}

// repair writes what must be written now and returns when to look again.
func (i *Installer) repair(f folder) (time.Duration, error) {
	now := i.cfg.Now()
	delay := i.pace.delay(now) // before the strikes below: it forgets old ones
	if i.owned != "" && !slices.ContainsFunc(f.own, func(c confFile) bool { return c.name == i.owned }) {
		i.pace.lost++
		i.log.Warn("our list was taken away", "file", i.owned)
	}
	if f.source == nil {
		return i.orphan(f, now)
	}
	i.orphaned = time.Time{}
	todo, err := i.todo(f)
	if err != nil || todo.none() {
		return 0, err
	}
	if delay > 0 {
		return delay, fmt.Errorf("%s is changed by somebody else again and again, the next repair is in %s: let its owner allow chained plugins",
			filepath.Join(i.cfg.ConfDir, todo.write), delay.Round(time.Millisecond))
	}
	if todo.write != "" {
		if err := i.write(todo); err != nil {
			return 0, err
		}
		if i.chained {
			i.pace.strike(now)
		}
		if first := f.loaded(); i.chained && !first.chained() {
			i.metrics.reinsertions.Inc()
		}
		i.chained = true
	}
	for _, name := range todo.remove {
		if err := os.Remove(filepath.Join(i.cfg.ConfDir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
	}
	return 0, nil
}

// orphan handles a folder without a file that we can be chained to: owned lists
// outlive their source only for a moment.
func (i *Installer) orphan(f folder, now time.Time) (time.Duration, error) {
	if len(f.own) == 0 || f.broken != nil { // a broken source may be whole again soon
		return 0, nil
	}
	if i.orphaned.IsZero() {
		i.orphaned = now
	}
	if left := orphanGrace - now.Sub(i.orphaned); left > 0 {
		return left, nil
	}
	for _, c := range f.own {
		i.log.Warn("our list is removed: the file that it was made from is gone", "file", c.name)
		if err := os.Remove(filepath.Join(i.cfg.ConfDir, c.name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
	}
	i.owned, i.orphaned = "", time.Time{}
	return 0, nil
}

// todo is one change of the folder: a file to write, and owned lists that go after it.
type todo struct {
	write     string
	old, text []byte
	remove    []string
}

func (t todo) none() bool { return t.write == "" && len(t.remove) == 0 }

// todo decides what the folder lacks.
func (i *Installer) todo(f folder) (todo, error) {
	var t todo
	src := *f.source
	if !i.standsIn(src, len(f.own) > 0) {
		for _, c := range f.own {
			t.remove = append(t.remove, c.name)
		}
		text, err := Insert(src.text, i.entry)
		if err != nil {
			return t, fmt.Errorf("%s: %w", filepath.Join(i.cfg.ConfDir, src.name), err)
		}
		if string(text) != string(src.text) {
			t.write, t.old, t.text = src.name, src.text, text
		}
		return t, nil
	}
	name, err := ownedName(i.cfg.OwnedName, f)
	if err != nil {
		return t, err
	}
	text, err := ownedList(src, i.entry)
	if err != nil {
		return t, fmt.Errorf("%s: %w", filepath.Join(i.cfg.ConfDir, src.name), err)
	}
	t.write, t.text = name, text
	for _, c := range f.own {
		switch {
		case c.name != name:
			t.remove = append(t.remove, c.name)
		case equal(c.text, text):
			t.write = ""
		default:
			t.old = c.text
		}
	}
	return t, nil
}

// standsIn reports whether an owned list is to stand for the source.
func (i *Installer) standsIn(src confFile, haveOwned bool) bool {
	switch {
	case !src.list || src.mode.Type() == fs.ModeSymlink:
		return true
	case i.pace.refused():
		return false
	default:
		return haveOwned || i.pace.contended()
	}
}

// ownedName returns a name that sorts before every foreign file.
func ownedName(name string, f folder) (string, error) {
	for _, candidate := range []string{name, "00-" + name} {
		if len(f.files) == 0 || candidate < f.files[0].name {
			return candidate, nil
		}
	}
	return "", fmt.Errorf("%s would be loaded before our list %s: give that a name that sorts first", f.files[0].name, name)
}

// write replaces one configuration.
func (i *Installer) write(t todo) error {
	path := filepath.Join(i.cfg.ConfDir, t.write)
	var before *replaced
	if t.old != nil && !isOwned(t.old) {
		var err error
		if before, err = keepReplaced(path, t, i.cfg.Now()); err != nil {
			return err
		}
	}
	if err := replaceConf(path, t.old, t.text); err != nil {
		before.close()
		return fmt.Errorf("write %s: %w", path, err)
	}
	i.replaced.close()
	i.replaced = before
	i.metrics.confWrites.Inc()
	i.log.Info("plugin put into the CNI chain", "file", path)
	return nil
}
