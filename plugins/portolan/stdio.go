package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// guardStdout takes standard output away from everything in this process but the
// one document that is written at the end: file descriptor 1 leads to standard
// error from now on, so that a stray print of a library cannot break the
// protocol (CNI-38, I12).
func guardStdout() (*os.File, error) {
	fd, err := unix.FcntlInt(1, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	if err := unix.Dup3(2, 1, 0); err != nil { // no standard error at all
		null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		if err != nil {
			return nil, err
		}
		defer func() { _ = null.Close() }()
		if err := unix.Dup3(int(null.Fd()), 1, 0); err != nil {
			return nil, os.NewSyscallError("dup", err)
		}
	}
	return os.NewFile(uintptr(fd), "stdout"), nil
}

// sinkLines is how many log lines wait for a slow reader; more are dropped.
const sinkLines = 256

// sink passes log lines on without ever waiting for whoever reads them (CNI-72):
// a full pipe loses lines, it does not hold an ADD.
type sink struct {
	lines   chan []byte
	done    chan struct{}
	dropped atomic.Int64

	mu     sync.RWMutex // guards closed against a late write
	closed bool
}

func newSink(w io.Writer) *sink {
	s := &sink{lines: make(chan []byte, sinkLines), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		for line := range s.lines {
			_, _ = w.Write(line)
		}
		if n := s.dropped.Load(); n > 0 {
			_, _ = fmt.Fprintf(w, "level=WARN msg=\"log lines dropped, the reader is slow\" lines=%d\n", n)
		}
	}()
	return s
}

// Write takes one line; it never fails and never blocks.
func (s *sink) Write(line []byte) (int, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return len(line), nil
	}
	select {
	case s.lines <- append([]byte(nil), line...):
	default:
		s.dropped.Add(1)
	}
	return len(line), nil
}

// close waits until what was taken is written, at most for the budget.
func (s *sink) close(budget time.Duration) {
	s.mu.Lock()
	s.closed = true
	close(s.lines)
	s.mu.Unlock()
	timer := time.NewTimer(budget)
	defer timer.Stop()
	select {
	case <-s.done:
	case <-timer.C:
	}
}
