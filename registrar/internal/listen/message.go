package listen

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// The layout of sock_diag(7) and netlink(7). Integers are in the host's order,
// ports and addresses in the network's.
const (
	headerSize    = unix.SizeofNlMsghdr
	requestSize   = headerSize + 56 // struct inet_diag_req_v2
	answerSize    = 72              // struct inet_diag_msg
	attributeSize = 4               // struct nlattr

	// tcpListen is the state TCP_LISTEN of the kernel's net/tcp_states.h.
	tcpListen = 10
	// attrV6Only is INET_DIAG_SKV6ONLY.
	attrV6Only = 11
	// attrTypeMask takes the flags off an attribute's type.
	attrTypeMask = 0x3fff
)

// maxSockets bounds what one dump may return. A table beyond it is an error: its
// pod has the cost of its own readiness.
const maxSockets = 1 << 16

var (
	// errMalformed is an answer that is not what sock_diag(7) says.
	errMalformed = errors.New("malformed sock_diag answer")
	// errChanged is an answer that the kernel marks as inconsistent.
	errChanged = errors.New("the table changed while it was read")
	// errTooMany is a table beyond maxSockets.
	errTooMany = fmt.Errorf("more than %d listening sockets", maxSockets)
)

// request returns a dump of all TCP sockets of a family in the listen state.
func request(family uint8, seq uint32) [requestSize]byte {
	var b [requestSize]byte
	binary.NativeEndian.PutUint32(b[0:], requestSize)
	binary.NativeEndian.PutUint16(b[4:], unix.SOCK_DIAG_BY_FAMILY)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	binary.NativeEndian.PutUint32(b[8:], seq)
	b[headerSize] = family
	b[headerSize+1] = unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[headerSize+4:], 1<<tcpListen)
	return b
}

// lookupRequest asks which socket a connection to 127.0.0.1:port by lo reaches.
// The kernel answers with that one socket, or with ENOENT.
func lookupRequest(port uint16, seq uint32) [requestSize]byte {
	b := request(unix.AF_INET, seq)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST)
	id := b[headerSize+8:] // struct inet_diag_sockid
	binary.BigEndian.PutUint16(id, port)
	copy(id[4:], []byte{127, 0, 0, 1})
	binary.NativeEndian.PutUint32(id[36:], loopbackIndex)
	binary.NativeEndian.PutUint64(id[40:], ^uint64(0)) // whatever its cookie
	return b
}

// lookups collects the answers to lookupRequests with the sequence numbers from
// first on.
type lookups struct {
	first   uint32
	ports   []uint16
	missing int // answers still to come
	sockets []socket
}

// parse takes one datagram. Answers to other requests are passed over.
func (l *lookups) parse(data []byte) error {
	for len(data) > 0 {
		m, rest, err := nextMessage(data)
		if err != nil {
			return err
		}
		data = rest
		i := m.seq - l.first
		if uint64(i) >= uint64(len(l.ports)) {
			continue
		}
		l.missing--
		switch m.kind {
		case unix.NLMSG_ERROR:
			if len(m.body) < 4 {
				return fmt.Errorf("%w: error of %d bytes", errMalformed, len(m.body))
			}
			switch err := errnoOf(m.body); {
			case err == nil:
				return fmt.Errorf("%w: an acknowledgement nobody asked for", errMalformed)
			case !errors.Is(err, unix.ENOENT):
				return fmt.Errorf("port %d: %w", l.ports[i], err)
			}
		case unix.SOCK_DIAG_BY_FAMILY:
			s, err := parseSocket(m.body)
			if err != nil {
				return err
			}
			if s.addr.Port() != l.ports[i] {
				return fmt.Errorf("%w: port %d for port %d", errMalformed, s.addr.Port(), l.ports[i])
			}
			l.sockets = append(l.sockets, s)
		default:
			return fmt.Errorf("%w: message of type %d", errMalformed, m.kind)
		}
	}
	return nil
}

// parser collects the sockets of one dump. Its slice is the caller's.
type parser struct {
	family  uint8
	seq     uint32
	sockets []socket
	// failed is the first thing wrong with a message that ended well; the dump is
	// read to its end all the same.
	failed error
}

// parse takes one datagram. done says that the dump has ended, well or not; an
// error before that means that the rest of it cannot be understood. Messages of
// an earlier dump are passed over.
func (p *parser) parse(data []byte) (done bool, err error) {
	for len(data) > 0 {
		var m netlinkMessage
		if m, data, err = nextMessage(data); err != nil {
			return false, err
		}
		if m.seq != p.seq || m.kind == unix.NLMSG_NOOP {
			continue
		}
		if m.flags&unix.NLM_F_DUMP_INTR != 0 && p.failed == nil {
			p.failed = errChanged
		}
		switch m.kind {
		case unix.NLMSG_DONE:
			if err := errnoOf(m.body); err != nil {
				return true, err
			}
			return true, p.failed
		case unix.NLMSG_ERROR:
			if len(m.body) < 4 {
				return false, fmt.Errorf("%w: error of %d bytes", errMalformed, len(m.body))
			}
			if err := errnoOf(m.body); err != nil {
				return true, err
			}
			return true, fmt.Errorf("%w: an acknowledgement nobody asked for", errMalformed)
		case unix.SOCK_DIAG_BY_FAMILY:
			if err := p.take(m.body); err != nil {
				return false, err
			}
		default:
			return false, fmt.Errorf("%w: message of type %d", errMalformed, m.kind)
		}
	}
	return false, nil
}

// netlinkMessage is one message of a datagram.
type netlinkMessage struct {
	kind, flags uint16
	seq         uint32
	body        []byte
}

// nextMessage takes the first message off data.
func nextMessage(data []byte) (m netlinkMessage, rest []byte, err error) {
	if len(data) < headerSize {
		return m, nil, fmt.Errorf("%w: %d bytes where a header must be", errMalformed, len(data))
	}
	size := int(binary.NativeEndian.Uint32(data))
	if size < headerSize || size > len(data) {
		return m, nil, fmt.Errorf("%w: message of %d bytes in %d", errMalformed, size, len(data))
	}
	m = netlinkMessage{
		kind:  binary.NativeEndian.Uint16(data[4:]),
		flags: binary.NativeEndian.Uint16(data[6:]),
		seq:   binary.NativeEndian.Uint32(data[8:]),
		body:  data[headerSize:size],
	}
	return m, data[min(align(size), len(data)):], nil
}

func (p *parser) take(body []byte) error {
	if len(body) > 0 && body[0] != p.family {
		return fmt.Errorf("%w: socket of family %d in a dump of family %d", errMalformed, body[0], p.family)
	}
	s, err := parseSocket(body)
	if err != nil {
		return err
	}
	if len(p.sockets) == maxSockets {
		p.failed = errTooMany
		return nil
	}
	p.sockets = append(p.sockets, s)
	return nil
}

// errnoOf reads the error number that a message carries; there may be none.
func errnoOf(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	n := int32(binary.NativeEndian.Uint32(body))
	switch {
	case n == 0:
		return nil
	case n > 0 || n < -4095:
		return fmt.Errorf("%w: error number %d", errMalformed, n)
	}
	return unix.Errno(-n)
}

// parseSocket reads a struct inet_diag_msg with its attributes.
func parseSocket(b []byte) (socket, error) {
	if len(b) < answerSize {
		return socket{}, fmt.Errorf("%w: socket of %d bytes", errMalformed, len(b))
	}
	family := b[0]
	if family != unix.AF_INET && family != unix.AF_INET6 || b[1] != tcpListen {
		return socket{}, fmt.Errorf("%w: socket of family %d in state %d", errMalformed, family, b[1])
	}
	port := binary.BigEndian.Uint16(b[4:])
	if port == 0 {
		return socket{}, fmt.Errorf("%w: a listener on port 0", errMalformed)
	}
	s := socket{device: binary.NativeEndian.Uint32(b[40:])}
	if family == unix.AF_INET {
		s.addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[8:12])), port)
		_, _, err := findAttribute(b[answerSize:], attrV6Only)
		return s, err
	}
	a := netip.AddrFrom16([16]byte(b[8:24]))
	v, ok, err := findAttribute(b[answerSize:], attrV6Only)
	if err != nil {
		return socket{}, err
	}
	if ok && len(v) != 1 {
		return socket{}, fmt.Errorf("%w: v6only of %d bytes", errMalformed, len(v))
	}
	// A kernel that does not say counts as one whose socket takes no IPv4: a port
	// must not be called ready on a guess.
	s.v6only = !ok || v[0] != 0
	s.addr = netip.AddrPortFrom(a.Unmap(), port)
	return s, nil
}

// findAttribute returns the value of the last attribute of a type. It reads all
// attributes, so that what is malformed is found.
func findAttribute(b []byte, want uint16) (value []byte, ok bool, err error) {
	for len(b) > 0 {
		if len(b) < attributeSize {
			return nil, false, fmt.Errorf("%w: %d bytes where an attribute must be", errMalformed, len(b))
		}
		size := int(binary.NativeEndian.Uint16(b))
		if size < attributeSize || size > len(b) {
			return nil, false, fmt.Errorf("%w: attribute of %d bytes in %d", errMalformed, size, len(b))
		}
		if binary.NativeEndian.Uint16(b[2:])&attrTypeMask == want {
			value, ok = b[attributeSize:size], true
		}
		b = b[min(align(size), len(b)):]
	}
	return value, ok, nil
}

// align rounds up to the alignment of netlink.
func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }
