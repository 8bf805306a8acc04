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

// listening is TCP_LISTEN of the kernel's socket states.
const listening = 10

// Reset aborts the connections whose local port is port in the network namespace at
// path, so that each peer gets a reset; listeners stay. It returns how many it ended.
// It needs CAP_NET_ADMIN there and a kernel with INET_DIAG_DESTROY: one without answers
// errors.ErrUnsupported.
func Reset(path string, port uint16) (int, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return 0, &os.PathError{Op: "open network namespace", Path: path, Err: err}
	}
	defer ns.Close()
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_INET_DIAG)
	if err != nil {
		return 0, fmt.Errorf("sock_diag socket in %s: %w", path, err)
	}
	defer handle.Close()
	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_INET_DIAG)
	if err != nil {
		return 0, fmt.Errorf("sock_diag socket in %s: %w", path, err)
	}
	defer socket.Close()
	sockets := map[int]*nl.SocketHandle{unix.NETLINK_INET_DIAG: {Socket: socket}}

	ended := 0
	var errs []error
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := handle.SocketDiagTCP(family)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			errs = append(errs, fmt.Errorf("list connections in %s: %w", path, err))
		}
		for _, s := range all {
			if s.ID.SourcePort != port || s.State == listening {
				continue
			}
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
	}
	return ended, errors.Join(errs...)
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
