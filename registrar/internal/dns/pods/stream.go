package pods

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

const (
	// maxConns bounds the TCP connections of one pod.
	maxConns = 128
	// maxPipelined bounds the queries of one connection that are looked up at the
	// same time; the next one is read when one of them is done.
	maxPipelined = 32
	// idleTimeout ends a connection on which no query begins. It is longer than
	// any look-up takes, so none is cut off (RFC 7766, 6.2.3).
	idleTimeout = 10 * time.Second
	// frameTimeout bounds the rest of a query that began, and each write.
	frameTimeout = 5 * time.Second
	// minQuery is a header; what is shorter ends the connection.
	minQuery = 12
)

func (s *service) serveTCP(ctx context.Context, l *net.TCPListener) error {
	errs := 0
	for {
		conn, err := l.AcceptTCP()
		if err != nil {
			if errs++; errors.Is(err, net.ErrClosed) || errs > maxReadErrors {
				return err
			}
			time.Sleep(readErrorPause)
			continue
		}
		errs = 0
		if !s.admit(conn) {
			s.metrics.refusedConns.Inc()
			_ = conn.Close()
			continue
		}
		s.running.Go(func() {
			s.serveConn(ctx, conn)
			s.dismiss(conn)
		})
	}
}

// admit says whether there is room for another connection.
func (s *service) admit(conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil || len(s.conns) >= maxConns {
		return false
	}
	s.conns[conn] = struct{}{}
	s.metrics.conns.Inc()
	return true
}

func (s *service) dismiss(conn net.Conn) {
	_ = conn.Close()
	s.metrics.conns.Dec()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, conn)
}

// serveConn answers the queries of one connection as their answers come, in any
// order (RFC 7766, 6.2.1.1). It returns when no more queries come and all were
// answered.
func (s *service) serveConn(ctx context.Context, conn net.Conn) {
	w := &frameWriter{conn: conn}
	slots := make(chan struct{}, maxPipelined)
	buf := make([]byte, maxQuery)
	for {
		raw, err := readFrame(conn, buf)
		if err != nil {
			break
		}
		slots <- struct{}{}
		s.handle(ctx, query{raw: raw, tcp: true, release: func() { <-slots }}, func(reply []byte) {
			if err := w.write(reply); err != nil {
				s.metrics.writeErrors.Inc()
			}
		})
	}
	// Every slot is free when every query is done with.
	for range maxPipelined {
		slots <- struct{}{}
	}
}

// errFrame ends a connection that does not speak DNS.
var errFrame = errors.New("length of a message out of range")

// readFrame reads one message into buf.
func readFrame(conn net.Conn, buf []byte) ([]byte, error) {
	var length [2]byte
	if err := conn.SetReadDeadline(time.Now().Add(idleTimeout)); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(length[:]))
	if n < minQuery || n > len(buf) {
		return nil, errFrame
	}
	if err := conn.SetReadDeadline(time.Now().Add(frameTimeout)); err != nil {
		return nil, err
	}
	_, err := io.ReadFull(conn, buf[:n])
	return buf[:n], err
}

// frameWriter writes whole messages from several goroutines.
type frameWriter struct {
	mu   sync.Mutex
	conn net.Conn
}

// write sends one message of at most 65535 bytes. A client that does not read
// loses its connection: what follows half a message cannot be understood.
func (w *frameWriter) write(msg []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	frame := make([]byte, 2, 2+len(msg))
	binary.BigEndian.PutUint16(frame, uint16(len(msg)))
	if err := w.conn.SetWriteDeadline(time.Now().Add(frameTimeout)); err != nil {
		return err
	}
	if _, err := w.conn.Write(append(frame, msg...)); err != nil {
		return errors.Join(err, w.conn.Close())
	}
	return nil
}
