package connection

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The kernel's socket states TCP_ESTABLISHED and TCP_LISTEN.
const (
	established = 1
	listening   = 10
)

// Count returns how many connections there are whose local port is port in the network
// namespace at path.
func Count(path string, port uint16) (int, error) {
	ns, handle, err := open(path)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	defer handle.Close()
	all, err := connections(handle, port)
	count := 0
	for _, s := range all {
		if s.State == established {
			count++
		}
	}
	if err != nil {
		err = fmt.Errorf("list connections in %s: %w", path, err)
	}
	return count, err
}

// Reset aborts the connections whose local port is port in the network namespace at
// path, so that each peer gets a reset; listeners stay. It returns how many it ended.
// It needs CAP_NET_ADMIN there and a kernel with INET_DIAG_DESTROY: one without answers
// errors.ErrUnsupported.
func Reset(path string, port uint16) (int, error) {
	ns, handle, err := open(path)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	defer handle.Close()
	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_INET_DIAG)
	if err != nil {
		return 0, fmt.Errorf("sock_diag socket in %s: %w", path, err)
	}
	defer socket.Close()
	sockets := map[int]*nl.SocketHandle{unix.NETLINK_INET_DIAG: {Socket: socket}}

	ended := 0
	var errs []error
	all, err := connections(handle, port)
	if err != nil {
		errs = append(errs, fmt.Errorf("list connections in %s: %w", path, err))
	}
	for _, s := range all {
		request := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
		request.Sockets = sockets
		request.AddData(destroy{family: s.Family, id: s.ID})
		switch _, err := request.Execute(unix.NETLINK_INET_DIAG, 0); {
		case err == nil:
			ended++
		case errors.Is(err, unix.ENOENT): // it ended by itself
		case errors.Is(err, unix.EOPNOTSUPP):
			return ended, fmt.Errorf("end connections in %s: %w: the kernel has no INET_DIAG_DESTROY", path, errors.ErrUnsupported)
		default:
			errs = append(errs, fmt.Errorf("end connection with %s in %s: %w", s.ID.Destination, path, err))
		}
	}
	return ended, errors.Join(errs...)
}

// open opens a network namespace and a sock_diag socket in it; the caller closes both.
func open(path string) (netns.NsHandle, *netlink.Handle, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return ns, nil, &os.PathError{Op: "open network namespace", Path: path, Err: err}
	}
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_INET_DIAG)
	if err != nil {
		return ns, nil, errors.Join(fmt.Errorf("sock_diag socket in %s: %w", path, err), ns.Close())
	}
	return ns, handle, nil
}

// connections are the sockets of both families with a local port that do not listen.
func connections(handle *netlink.Handle, port uint16) ([]*netlink.Socket, error) {
	var out []*netlink.Socket
	var errs []error
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := handle.SocketDiagTCP(family)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			errs = append(errs, err)
		}
		for _, s := range all {
			if s.ID.SourcePort == port && s.State != listening {
				out = append(out, s)
			}
		}
	}
	return out, errors.Join(errs...)
}

// destroy is struct inet_diag_req_v2 of the kernel for one socket.
type destroy struct {
	family uint8
	id     netlink.SocketID
}

// Len implements nl.NetlinkRequestData.
func (destroy) Len() int { return 56 }

// Serialize implements nl.NetlinkRequestData.
func (d destroy) Serialize() []byte {
	b := make([]byte, 0, d.Len())
	b = append(b, d.family, unix.IPPROTO_TCP, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, 1<<32-1) // in any state
	b = binary.BigEndian.AppendUint16(b, d.id.SourcePort)
	b = binary.BigEndian.AppendUint16(b, d.id.DestinationPort)
	for _, address := range []net.IP{d.id.Source, d.id.Destination} {
		var bytes [net.IPv6len]byte
		if d.family == unix.AF_INET {
			copy(bytes[:], address.To4())
		} else {
			copy(bytes[:], address.To16())
		}
		b = append(b, bytes[:]...)
	}
	b = binary.NativeEndian.AppendUint32(b, d.id.Interface)
	for _, part := range d.id.Cookie {
		b = binary.NativeEndian.AppendUint32(b, part)
	}
	return b
}
