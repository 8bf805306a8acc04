package installer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"
)

// Removal says whether the mesh is being removed from this node for good.
type Removal interface {
	// Removed is true only if that is certain; an error is a no (CNI-3).
	Removed(ctx context.Context) (bool, error)
}

// Config says what is installed where.
type Config struct {
	// ConfDir is where the runtime looks for network configurations, BinDir where
	// it looks for plugins. Both are made if they are missing.
	ConfDir, BinDir string
	// Source is the plugin's binary that is copied to BinDir.
	Source string
	// Entry is what is put into the chain.
	Entry Entry
	// OwnedName is the file name of an owned list, a .conflist. It should sort before
	// every other file; if it does not, "00-" is put before it.
	OwnedName string
	// Instance tells this process from those before and after it, at most 200 bytes.
	// It is empty for a one-time installation, which claims only a folder of nobody.
	Instance string
	// Removal is asked when Run ends; nil is a no.
	Removal Removal
	// Poll is how often is looked at everything, whatever the watch says.
	Poll time.Duration
	// Now is the clock of back-offs.
	Now func() time.Time
	// NewWatcher opens a watch; nil is fsnotify's.
	NewWatcher func() (*fsnotify.Watcher, error)
	Log        *slog.Logger
	// Metrics may be nil.
	Metrics prometheus.Registerer
}

// maxInstance leaves a marker readable as a whole.
const maxInstance = 200

func (c *Config) validate() error {
	var errs []error
	for _, p := range []struct{ what, path string }{{"configuration folder", c.ConfDir}, {"binary folder", c.BinDir}, {"plugin", c.Source}} {
		if !filepath.IsAbs(p.path) {
			errs = append(errs, fmt.Errorf("%s %q: need an absolute path", p.what, p.path))
		}
	}
	if filepath.Ext(c.OwnedName) != ".conflist" || filepath.Base(c.OwnedName) != c.OwnedName {
		errs = append(errs, fmt.Errorf("name of the own list %q: need a file name that ends in .conflist", c.OwnedName))
	}
	if len(c.Instance) > maxInstance {
		errs = append(errs, fmt.Errorf("instance %q: at most %d bytes", c.Instance, maxInstance))
	}
	if c.Poll <= 0 {
		errs = append(errs, fmt.Errorf("poll interval %s: need a time above 0", c.Poll))
	}
	return errors.Join(errs...)
}

// State is what an Installer knows about the node's chain.
type State struct {
	// Chained: the file that the runtime loads has our entry behind another plugin's.
	Chained bool
	// File is what the runtime loads, "" if there is nothing to load.
	File string
	// Problem says why the chain is not as it should be; "" when it is.
	Problem string
	// Watch says why the folders are only polled; "" when they are watched.
	Watch string
	// Removed: Run has ended and taken the plugin out of the chain for good.
	Removed bool
}
