package cache

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Outstanding is what one key still waits for on one stream.
type Outstanding struct {
	Key Key
	// Stream and Node of the client.
	Stream uint64
	Node   string
	// Reason in words.
	Reason string
}

// String returns it in one line for an error message.
func (o Outstanding) String() string {
	return fmt.Sprintf("%s: %s (node %q, stream %d)", o.Key, o.Reason, o.Node, o.Stream)
}

// Outstanding reports what an Await, or with subscribed an AwaitSubscribed, of
// keys waits for now, sorted; it is for an error message when the wait was given
// up (contract 4.2: the error names what is missing).
func (c *Cache) Outstanding(keys []Key, subscribed bool) []Outstanding {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []Outstanding
	for _, key := range keys {
		t := target{key: key}
		if e := c.entries[key.Kind][key.Name]; e != nil {
			t.seq = e.seq
		}
		for st := range c.streams[key.Kind.service()] {
			if how, _ := st.stateLocked(t, subscribed); how != outstanding {
				continue
			}
			out = append(out, Outstanding{Key: key, Stream: st.id, Node: st.node.GetId(), Reason: st.reasonLocked(key)})
		}
	}
	slices.SortFunc(out, func(a, b Outstanding) int {
		return cmp.Or(a.Key.Compare(b.Key), cmp.Compare(a.Stream, b.Stream))
	})
	return out
}

func (st *Stream) reasonLocked(key Key) string {
	sub := st.subs[key.Kind]
	if sub == nil || sub.views[key.Name] == nil {
		return "Envoy has not asked for it"
	}
	v := sub.views[key.Name]
	switch {
	case st.cache.held:
		return "held back, the registrar does not know everything yet"
	case v.flying:
		return "sent, not acknowledged"
	case !v.heldSince.IsZero():
		return "waits for the acknowledgement of what must come first"
	case v.e.want() == versionUnknown:
		return "the registrar has not said what it is"
	case sub.flight != nil:
		return "waits behind a response that is not acknowledged"
	}
	return "to be sent"
}

// Unsettled returns the keys of a kind, sorted, whose name begins with prefix and which a
// client may have in an earlier state: a change, a removal too, is not acknowledged, or it
// was rejected, or nobody has said yet what the name is. To await these is to await all
// names that begin so. It costs what is unsettled.
func (c *Cache) Unsettled(kind Kind, prefix string) []Key {
	c.mu.Lock()
	defer c.mu.Unlock()
	names := make(map[string]struct{})
	add := func(name string) {
		if strings.HasPrefix(name, prefix) {
			names[name] = struct{}{}
		}
	}
	for key := range c.demand.wanted {
		if key.Kind == kind {
			add(key.Name)
		}
	}
	for st := range c.streams[kind.service()] {
		if sub := st.subs[kind]; sub != nil {
			sub.eachUnsettledLocked(add)
		}
	}
	keys := make([]Key, 0, len(names))
	for name := range names {
		keys = append(keys, Key{Kind: kind, Name: name})
	}
	slices.SortFunc(keys, Key.Compare)
	return keys
}

// eachUnsettledLocked calls fn with the names of what is to be sent, is on its way, or was
// rejected; with some more than once.
func (s *subscription) eachUnsettledLocked(fn func(name string)) {
	for _, v := range s.dirty {
		fn(v.e.key.Name)
	}
	if s.flight != nil {
		for i := range s.flight.views {
			fn(s.flight.views[i].v.e.key.Name)
		}
	}
	for i := range s.suspects {
		for _, v := range s.suspects[i].views {
			fn(v.e.key.Name)
		}
	}
	for name := range s.rejections {
		fn(name)
	}
}
