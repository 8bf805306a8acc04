package capture

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Alive keeps the redirection of DNS in one pod's namespace alive: a set element
// that expires AliveTimeout after the last Refresh. It belongs to the mesh-DNS
// process, which refreshes only while it can answer (dataplane decision 9). Its
// methods may be called from several goroutines.
//
// An Alive holds two file descriptors that keep the namespace from going away:
// Close it when the pod is deleted.
type Alive struct {
	path string

	mu    sync.Mutex // guards what follows
	netns ns.NetNS
	conn  *nftables.Conn // nil before the first use and after an error
	sock  *netlink.Conn  // conn's socket, for its deadline
	seen  bool           // conn has seen the set
}

// OpenAlive opens the namespace at path. It changes nothing in it yet.
func OpenAlive(path string) (*Alive, error) {
	netns, err := ns.GetNS(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", path, err)
	}
	return &Alive{path: path, netns: netns}, nil
}

// Refresh gives the redirection another AliveTimeout. A namespace without our
// table, or without captured DNS, gives ErrNoTable.
func (a *Alive) Refresh() error {
	if err := a.change(true); err != nil {
		return fmt.Errorf("keep DNS capture alive in %s: %w", a.path, err)
	}
	return nil
}

// Withdraw ends the redirection at once: the next query goes where it was sent.
// A namespace without our table is success.
func (a *Alive) Withdraw() error {
	if err := a.change(false); err != nil && !errors.Is(err, ErrNoTable) {
		return fmt.Errorf("withdraw DNS capture in %s: %w", a.path, err)
	}
	return nil
}

// Close gives the namespace up. The redirection ends by its timeout, or by
// Withdraw before.
func (a *Alive) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return errors.Join(a.hangUpLocked(), a.netns.Close())
}

// change replaces the element in one transaction, or deletes it.
func (a *Alive) change(keep bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.dialLocked(); err != nil {
		return err
	}
	err := a.lookLocked()
	set := aliveSet().set(ourTable())
	switch {
	case err != nil:
	case keep:
		err = renewAlive(a.conn, set)
	default:
		err = deleteAlive(a.conn, set)
	}
	if err == nil {
		err = a.conn.Flush()
	}
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENOENT) {
		err = ErrNoTable
	}
	// Answers of this transaction may still be on their way.
	return errors.Join(err, a.hangUpLocked())
}

// aliveSet is the set that holds the port of DNS while it is redirected.
func aliveSet() setSpec {
	return setSpec{name: setAlive, key: nftables.TypeInetService, timeout: AliveTimeout}
}

func aliveElement() []nftables.SetElement {
	return []nftables.SetElement{{Key: binary.BigEndian.AppendUint16(nil, portDNS), Timeout: AliveTimeout}}
}

// addAlive queues the element of a set that has none.
func addAlive(c *nftables.Conn, set *nftables.Set) error {
	return c.SetAddElements(set, aliveElement())
}

// deleteAlive queues the deletion of the element. Adding it first makes that possible
// when it had expired.
func deleteAlive(c *nftables.Conn, set *nftables.Set) error {
	return errors.Join(addAlive(c, set), c.SetDeleteElements(set, aliveElement()))
}

// renewAlive queues a new timeout for the element: adding alone starts none on every
// kernel.
func renewAlive(c *nftables.Conn, set *nftables.Set) error {
	return errors.Join(deleteAlive(c, set), addAlive(c, set))
}

// lookLocked makes sure that the set is there before the first transaction. The mesh DNS
// opens a pod while its ADD is at work, and a transaction that fails would hold up the
// one that makes the table for a grace period of the kernel.
func (a *Alive) lookLocked() error {
	if a.seen {
		return nil
	}
	_, err := a.conn.GetSetByName(ourTable(), setAlive)
	a.seen = err == nil
	return err
}

// dialLocked opens the socket, which stays in the namespace, and gives the next
// exchange its time.
func (a *Alive) dialLocked() error {
	if a.conn == nil {
		err := a.netns.Do(func(ns.NetNS) error {
			conn, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(s *netlink.Conn) error {
				a.sock = s
				return nil
			}))
			a.conn = conn
			return err
		})
		if err != nil {
			a.conn = nil
			return fmt.Errorf("open nftables: %w", err)
		}
	}
	return a.sock.SetDeadline(time.Now().Add(ioTimeout))
}

func (a *Alive) hangUpLocked() error {
	if a.conn == nil {
		return nil
	}
	err := a.conn.CloseLasting()
	a.conn, a.sock, a.seen = nil, nil, false
	return err
}
