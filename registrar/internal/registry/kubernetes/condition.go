package kubernetes

import (
	"fmt"
	"time"
)

// link is what is known of the API server. Backend.mu guards it.
type link struct {
	// listed: a complete list was read in this process. serving: ready is closed.
	listed, serving bool
	// saved: an earlier process saved a complete one.
	saved bool
	// since is when reading began to fail, and err why; zero while it works.
	since time.Time
	err   error
	// asked: there was an answer, or a failure, in this process.
	asked bool
	// writeErr is why the last write failed; nil when it succeeded.
	writeErr error
	// version is the newest resourceVersion that was read.
	version string
}

// condition is one moment of a Backend, for people and metrics.
type condition struct {
	link
	// unwritten counts the objects of this node that the API server does not have as
	// they are, refused those of them that it does not take.
	unwritten, refused int
	// unusable counts the objects that are left out.
	unusable int
}

func (b *Backend) condition() condition {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := condition{link: b.link, unusable: len(b.foreign.unusable)}
	for _, o := range b.own {
		switch {
		case o.refused:
			c.refused++
		case b.pending(o):
			c.unwritten++
		}
	}
	return c
}

// stale says whether records of other nodes may be outdated.
func (c condition) stale() bool { return !c.listed || c.err != nil }

// problem is what people should know, or nil.
func (c condition) problem(host string) error {
	since := c.since.Format(time.RFC3339)
	switch {
	case c.err == nil && !c.listed:
		return fmt.Errorf("the list of endpoints is being read from the Kubernetes API at %s", host)
	case !c.listed && !c.saved:
		return fmt.Errorf("the Kubernetes API at %s has given no list of endpoints since %s, and none is saved: nothing is served until it does: %w", host, since, c.err)
	case c.err != nil:
		return fmt.Errorf("the Kubernetes API at %s is away since %s: endpoints of other nodes may be outdated, %d of this node wait to be written: %w", host, since, c.unwritten, c.err)
	case c.unwritten > 0 && c.writeErr != nil:
		return fmt.Errorf("%d endpoints of this node wait to be written to the Kubernetes API: %w", c.unwritten, c.writeErr)
	case c.refused > 0:
		return fmt.Errorf("the Kubernetes API refuses %d endpoints of this node; the log has the reasons", c.refused)
	case c.unusable > 0:
		return fmt.Errorf("%d ServiceEndpoints cannot be used and are left out; the log has the reasons", c.unusable)
	}
	return nil
}
