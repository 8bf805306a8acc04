package listen

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"
)

const (
	// maxAttempts bounds how often a dump is repeated that the kernel could not
	// finish, or that sockets changed under.
	maxAttempts = 3
	// maxLookups bounds the answers that wait in the socket's buffer at one time.
	maxLookups = 32
	// maxLeftovers bounds the datagrams of an abandoned dump that are thrown away
	// before the next one: more than maxSockets fill.
	maxLeftovers = 1 << 12
)

// Table reads the listen table of one network namespace. It is safe for concurrent
// use.
type Table struct {
	path string

	// mu guards the rest; it is held while the kernel answers, some 50 µs.
	mu     sync.Mutex
	kernel kernel // nil when closed
	seq    uint32
	req    []byte // reused
	hint   int    // sockets of the last dump
}

// kernel is the other end of a sock_diag socket.
type kernel interface {
	// send asks.
	send(request []byte) error
	// receive returns the next datagram, valid until the next call. It never
	// waits: nothing there is EAGAIN.
	receive() ([]byte, error)
	close() error
}

// Open opens the listen table of the namespace at path. The namespace stays alive
// until Close, whatever becomes of path. It needs CAP_SYS_ADMIN.
func Open(path string) (*Table, error) {
	namespace, err := ns.GetNS(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	defer func() { _ = namespace.Close() }()
	var conn *diagSocket
	err = namespace.Do(func(ns.NetNS) error {
		conn, err = openDiagSocket()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open the listen table of network namespace %s: %w", path, err)
	}
	return &Table{path: path, kernel: conn}, nil
}

// Close lets the namespace go. A closed Table answers os.ErrClosed.
func (t *Table) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.kernel == nil {
		return fmt.Errorf("close the listen table of %s: %w", t.path, os.ErrClosed)
	}
	err := t.kernel.close()
	t.kernel = nil
	return err
}

// Read returns the table as it is now. It never waits for anything but the kernel.
// A table that changes meanwhile may be returned without a socket that was there
// all the time, when it has more of them than fit in one datagram (about 60).
func (t *Table) Read() (Snapshot, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.kernel == nil {
		return Snapshot{}, fmt.Errorf("read the listen table of %s: %w", t.path, os.ErrClosed)
	}
	sockets := make([]socket, 0, t.hint)
	for _, family := range [...]uint8{unix.AF_INET, unix.AF_INET6} {
		var err error
		if sockets, err = t.dump(family, sockets); err != nil {
			return Snapshot{}, fmt.Errorf("read the listen table of %s: %w", t.path, err)
		}
	}
	t.hint = len(sockets)
	return newSnapshot(sockets), nil
}

// Lookup returns, out of the table as it is now, the listeners that connections to
// 127.0.0.1 at the ports reach, each of which may be given once. It costs a few
// microseconds per port, whatever else listens on the machine: a dump walks the
// kernel's hash of all listeners of all namespaces. What it returns is there; a
// port without a listener in it may still have one elsewhere, see Read.
func (t *Table) Lookup(ports []uint16) (Snapshot, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.kernel == nil {
		return Snapshot{}, fmt.Errorf("look up listeners of %s: %w", t.path, os.ErrClosed)
	}
	sockets := make([]socket, 0, len(ports))
	for chunk := range slices.Chunk(ports, maxLookups) {
		var err error
		if sockets, err = t.lookup(chunk, sockets); err != nil {
			t.discard()
			return Snapshot{}, fmt.Errorf("look up listeners of %s: %w", t.path, err)
		}
	}
	return newSnapshot(sockets), nil
}

// lookup asks for all ports in one datagram; each is answered by its own.
func (t *Table) lookup(ports []uint16, sockets []socket) ([]socket, error) {
	l := lookups{first: t.seq + 1, ports: ports, missing: len(ports), sockets: sockets}
	t.req = t.req[:0]
	for _, p := range ports {
		t.seq++
		req := lookupRequest(p, t.seq)
		t.req = append(t.req, req[:]...)
	}
	if err := t.kernel.send(t.req); err != nil {
		return nil, fmt.Errorf("ask the kernel: %w", err)
	}
	for l.missing > 0 {
		data, err := t.kernel.receive()
		if err != nil {
			return nil, fmt.Errorf("take the kernel's answer: %w", err)
		}
		if err := l.parse(data); err != nil {
			return nil, err
		}
	}
	return l.sockets, nil
}

// dump appends the sockets of a family, repeating what the kernel could not finish.
func (t *Table) dump(family uint8, sockets []socket) ([]socket, error) {
	for attempt := 1; ; attempt++ {
		out, err := t.dumpOnce(family, sockets)
		switch {
		case err == nil:
			return out, nil
		case errors.Is(err, unix.ENOENT) && family == unix.AF_INET6:
			return sockets, nil // a kernel without IPv6
		case errors.Is(err, unix.ENOENT):
			return nil, fmt.Errorf("the kernel cannot list TCP sockets, load the module tcp_diag: %w", err)
		}
		t.discard()
		if attempt == maxAttempts || !transient(err) {
			return nil, err
		}
	}
}

// transient reports whether asking again may help: the kernel was out of memory,
// is still busy with an abandoned dump, or lost or changed a part of this one.
func transient(err error) bool {
	for _, e := range []error{errChanged, unix.EINTR, unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM, unix.EBUSY} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (t *Table) dumpOnce(family uint8, sockets []socket) ([]socket, error) {
	t.seq++
	req := request(family, t.seq)
	t.req = append(t.req[:0], req[:]...)
	if err := t.kernel.send(t.req); err != nil {
		return nil, fmt.Errorf("ask the kernel: %w", err)
	}
	p := parser{family: family, seq: t.seq, sockets: sockets}
	for {
		data, err := t.kernel.receive()
		if err != nil {
			return nil, fmt.Errorf("take the kernel's answer: %w", err)
		}
		done, err := p.parse(data)
		if err != nil {
			return nil, err
		}
		if done {
			return p.sockets, nil
		}
	}
}

// discard throws away what is left of a dump.
func (t *Table) discard() {
	for range maxLeftovers {
		if _, err := t.kernel.receive(); errors.Is(err, unix.EAGAIN) {
			return
		}
	}
}
