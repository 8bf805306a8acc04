package app

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
)

// lostSockets are sockets that somebody removed and that cannot be made again: in a
// container the folder is a mount, and stays gone until the pod is made anew.
type lostSockets struct {
	mu    sync.Mutex
	paths map[string]error
}

// socket returns what is told of one socket (unixsocket.Config.Lost).
func (l *lostSockets) socket(log *slog.Logger, path string) func(error) {
	return func(err error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if err == nil {
			delete(l.paths, path)
			log.Info("a socket that was removed is there again", "path", path)
			return
		}
		if l.paths == nil {
			l.paths = map[string]error{}
		}
		l.paths[path] = err
		log.Error("a socket was removed and cannot be made again: start the registrar and the data plane of this node again", "path", path, "error", err)
	}
}

// missing names them, "" if there is none.
func (l *lostSockets) missing() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.paths) == 0 {
		return ""
	}
	paths := slices.Sorted(maps.Keys(l.paths))
	return fmt.Sprintf("somebody removed %s: start the registrar and the data plane of this node again (%v)", strings.Join(paths, " and "), l.paths[paths[0]])
}
