package unixsocket

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// watchInterval is how often the socket's file is looked at.
const watchInterval = time.Second

// socket is one bound socket with the lock that goes with it.
type socket struct {
	net.Listener
	lock *os.File
	// file is the socket's file as it was bound.
	file fs.FileInfo
}

// close removes the socket, if it is still the one at the path, before the lock
// is given back.
func (s *socket) close() error {
	if l, ok := s.Listener.(*net.UnixListener); ok {
		l.SetUnlinkOnClose(s.inPlace())
	}
	return errors.Join(s.Close(), s.lock.Close())
}

// inPlace reports whether the socket's file is still at its path.
func (s *socket) inPlace() bool {
	now, err := os.Lstat(s.Addr().String())
	return err == nil && (s.file == nil || os.SameFile(s.file, now))
}

// listener accepts from the socket at a path, which is made again when it is
// removed.
type listener struct {
	cfg   Config
	conns chan accepted
	stop  context.CancelFunc
	// done is closed when nothing of the listener runs any more.
	done chan struct{}

	once sync.Once
	err  error // of the close; written within once

	mu  sync.Mutex
	now *socket // guarded by mu
}

// accepted is one result of Accept.
type accepted struct {
	conn net.Conn
	err  error
}

// watch serves s until Close; ctx only bounded the opening.
func watch(ctx context.Context, cfg Config, s *socket) *listener {
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	l := &listener{cfg: cfg, conns: make(chan accepted), stop: stop, done: make(chan struct{}), now: s}
	var wg sync.WaitGroup
	wg.Go(func() { l.accept(ctx, s) })
	wg.Go(func() { l.keep(ctx, &wg) })
	go func() {
		wg.Wait()
		close(l.done)
	}()
	return l
}

// accept hands over the connections of one socket until that is closed.
func (l *listener) accept(ctx context.Context, s *socket) {
	for {
		conn, err := s.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && !l.admits(conn) {
			_ = conn.Close() // it may not use the socket; there is nothing to tell it
			continue
		}
		select {
		case l.conns <- accepted{conn, err}:
		case <-ctx.Done():
			if conn != nil {
				_ = conn.Close() // nobody takes it any more
			}
			return
		}
	}
}

// admits reports whether the peer's user may connect.
func (l *listener) admits(conn net.Conn) bool {
	if len(l.cfg.Users) == 0 {
		return true
	}
	p, err := PeerOf(conn)
	return err == nil && slices.Contains(l.cfg.Users, p.UID)
}

// keep makes the socket again when it is gone from its path. What fails is tried
// again: a directory that cannot be made now may be made later.
func (l *listener) keep(ctx context.Context, wg *sync.WaitGroup) {
	t := time.NewTicker(watchInterval)
	defer t.Stop()
	lost := false
	tell := func(err error) {
		if l.cfg.Lost != nil && (err != nil) != lost {
			l.cfg.Lost(err)
		}
		lost = err != nil
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		old := l.current()
		if old.inPlace() {
			continue
		}
		// The lock first: its file may have gone with the directory, or be there and
		// then still be held by us.
		_ = old.close()
		s, err := open(ctx, l.cfg)
		if err != nil {
			tell(err)
			continue
		}
		if !l.replace(ctx, s) {
			_ = s.close()
			return
		}
		wg.Go(func() { l.accept(ctx, s) })
		tell(nil)
	}
}

// replace puts s in the place of the present socket, unless Close was called: that
// closes the one it finds.
func (l *listener) replace(ctx context.Context, s *socket) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	l.now = s
	return true
}

func (l *listener) current() *socket {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.now
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case a := <-l.conns:
		return a.conn, a.err
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.once.Do(func() {
		l.stop()
		l.err = l.current().close()
		<-l.done
	})
	return l.err
}

// Addr implements net.Listener.
func (l *listener) Addr() net.Addr { return l.current().Addr() }
