package listen

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// message returns a netlink message of sequence 1.
func message(kind, flags uint16, body []byte) []byte {
	return messageOf(1, kind, flags, body)
}

func messageOf(seq uint32, kind, flags uint16, body []byte) []byte {
	b := make([]byte, headerSize, align(headerSize+len(body)))
	binary.NativeEndian.PutUint32(b, uint32(headerSize+len(body)))
	binary.NativeEndian.PutUint16(b[4:], kind)
	binary.NativeEndian.PutUint16(b[6:], flags)
	binary.NativeEndian.PutUint32(b[8:], seq)
	b = append(b, body...)
	return b[:cap(b)]
}

// answer returns a struct inet_diag_msg of a listener with attributes.
func answer(addr netip.AddrPort, attributes ...[]byte) []byte {
	b := make([]byte, answerSize)
	b[0], b[1] = unix.AF_INET, tcpListen
	if addr.Addr().Is6() {
		b[0] = unix.AF_INET6
	}
	binary.BigEndian.PutUint16(b[4:], addr.Port())
	copy(b[8:], addr.Addr().AsSlice())
	return slices.Concat(append([][]byte{b}, attributes...)...)
}

func attribute(kind uint16, value ...byte) []byte {
	b := make([]byte, attributeSize, align(attributeSize+len(value)))
	binary.NativeEndian.PutUint16(b, uint16(attributeSize+len(value)))
	binary.NativeEndian.PutUint16(b[2:], kind)
	b = append(b, value...)
	return b[:cap(b)]
}

func errorBody(errno unix.Errno) []byte {
	b := make([]byte, 4)
	binary.NativeEndian.PutUint32(b, uint32(-int32(errno)))
	return b
}

func change(b []byte, at int, value byte) []byte {
	b = slices.Clone(b)
	b[at] = value
	return b
}

var (
	v4 = netip.MustParseAddrPort("127.0.0.1:8080")
	v6 = netip.MustParseAddrPort("[::]:9090")
)

// The request asks for all TCP sockets of a family in the listen state and in no
// other: the cost must not grow with connections.
func TestRequest(t *testing.T) {
	b := request(unix.AF_INET6, 7)
	want := make([]byte, 72)
	binary.NativeEndian.PutUint32(want, 72)
	binary.NativeEndian.PutUint16(want[4:], 20)    // SOCK_DIAG_BY_FAMILY
	binary.NativeEndian.PutUint16(want[6:], 0x301) // request, dump
	binary.NativeEndian.PutUint32(want[8:], 7)
	want[16], want[17] = 10, 6                      // AF_INET6, IPPROTO_TCP
	binary.NativeEndian.PutUint32(want[20:], 1<<10) // TCP_LISTEN
	if diff := cmp.Diff(want, b[:]); diff != "" {
		t.Error(diff)
	}
}

// Every answer that is not what sock_diag(7) says is an error, never a guess.
func TestParse(t *testing.T) {
	done := message(unix.NLMSG_DONE, 0, make([]byte, 4))
	row4 := message(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_MULTI, answer(v4))
	v6row := func(attributes ...[]byte) []byte {
		return message(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_MULTI, answer(v6, attributes...))
	}
	onlyV6 := socket{addr: v6, v6only: true}
	tests := []struct {
		name   string
		family uint8
		data   []byte
		want   []socket
		done   bool
		err    string
	}{
		{"nothing", unix.AF_INET, nil, nil, false, ""},
		{"end", unix.AF_INET, done, nil, true, ""},
		{"end without a number", unix.AF_INET, message(unix.NLMSG_DONE, 0, nil), nil, true, ""},
		{"a socket", unix.AF_INET, row4, []socket{{addr: v4}}, false, ""},
		{"a socket and the end", unix.AF_INET, slices.Concat(row4, done), []socket{{addr: v4}}, true, ""},
		{"nothing after the end counts", unix.AF_INET, slices.Concat(done, row4), nil, true, ""},
		{"no-op", unix.AF_INET, slices.Concat(message(unix.NLMSG_NOOP, 0, nil), row4), []socket{{addr: v4}}, false, ""},
		{"an earlier dump", unix.AF_INET, messageOf(9, unix.NLMSG_DONE, 0, nil), nil, false, ""},
		{"IPv6 dual-stack", unix.AF_INET6, v6row(attribute(attrV6Only, 0)), []socket{{addr: v6}}, false, ""},
		{"IPv6-only", unix.AF_INET6, v6row(attribute(attrV6Only, 1)), []socket{onlyV6}, false, ""},
		{"IPv6-only among others", unix.AF_INET6, v6row(attribute(8, 0), attribute(attrV6Only, 1), attribute(15, 1, 2, 3, 4)), []socket{onlyV6}, false, ""},
		{"IPv6, kernel does not say", unix.AF_INET6, v6row(), []socket{onlyV6}, false, ""},
		{"nested attribute flag", unix.AF_INET6, v6row(attribute(attrV6Only|0x8000, 0)), []socket{{addr: v6}}, false, ""},
		{
			"IPv4-mapped", unix.AF_INET6,
			message(unix.SOCK_DIAG_BY_FAMILY, 0, answer(netip.MustParseAddrPort("[::ffff:127.0.0.1]:8080"), attribute(attrV6Only, 0))),
			[]socket{{addr: v4}},
			false, "",
		},
		{"on an interface", unix.AF_INET, change(row4, headerSize+40, 3), []socket{{addr: v4, device: 3}}, false, ""},

		{"short header", unix.AF_INET, row4[:15], nil, false, "15 bytes where a header must be"},
		{"longer than the datagram", unix.AF_INET, row4[:len(row4)-4], nil, false, "message of 88 bytes in 84"},
		{"shorter than a header", unix.AF_INET, change(row4, 0, 15), nil, false, "message of 15 bytes in 88"},
		{"short socket", unix.AF_INET, message(unix.SOCK_DIAG_BY_FAMILY, 0, answer(v4)[:71]), nil, false, "socket of 71 bytes"},
		{"another family", unix.AF_INET6, row4, nil, false, "socket of family 2 in a dump of family 10"},
		{"unknown family", 7, change(row4, headerSize, 7), nil, false, "socket of family 7 in state 10"},
		{"another state", unix.AF_INET, change(row4, headerSize+1, 1), nil, false, "socket of family 2 in state 1"},
		{"port 0", unix.AF_INET, message(unix.SOCK_DIAG_BY_FAMILY, 0, answer(netip.AddrPortFrom(v4.Addr(), 0))), nil, false, "a listener on port 0"},
		{"short attribute header", unix.AF_INET, message(unix.SOCK_DIAG_BY_FAMILY, 0, answer(v4, []byte{1, 2, 3})), nil, false, "3 bytes where an attribute must be"},
		{"attribute too short", unix.AF_INET6, v6row(change(attribute(attrV6Only, 0), 0, 3)), nil, false, "attribute of 3 bytes"},
		{"attribute too long", unix.AF_INET6, v6row(change(attribute(attrV6Only, 0), 0, 99)), nil, false, "attribute of 99 bytes"},
		{"wide v6only", unix.AF_INET6, v6row(attribute(attrV6Only, 0, 0)), nil, false, "v6only of 2 bytes"},
		{"unknown message", unix.AF_INET, message(77, 0, nil), nil, false, "message of type 77"},
		{"overrun", unix.AF_INET, message(unix.NLMSG_OVERRUN, 0, nil), nil, false, "message of type 4"},
		{"short error", unix.AF_INET, message(unix.NLMSG_ERROR, 0, []byte{1}), nil, false, "error of 1 bytes"},
		{"acknowledgement", unix.AF_INET, message(unix.NLMSG_ERROR, 0, make([]byte, 4)), nil, true, "an acknowledgement nobody asked for"},
		{"error", unix.AF_INET, message(unix.NLMSG_ERROR, 0, errorBody(unix.EPERM)), nil, true, "operation not permitted"},
		{"positive error", unix.AF_INET, message(unix.NLMSG_ERROR, 0, []byte{5, 0, 0, 0}), nil, true, "error number 5"},
		{"end with an error", unix.AF_INET, message(unix.NLMSG_DONE, 0, errorBody(unix.ENOMEM)), nil, true, "cannot allocate memory"},
		{"changed", unix.AF_INET, slices.Concat(message(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP_INTR, answer(v4)), done), []socket{{addr: v4}}, true, "the table changed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := parser{family: tt.family, seq: 1}
			end, err := p.parse(tt.data)
			if end != tt.done {
				t.Errorf("done %v, want %v", end, tt.done)
			}
			switch {
			case tt.err == "" && err != nil:
				t.Errorf("error %v", err)
			case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
				t.Errorf("error %v, want %q", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, p.sockets, cmp.AllowUnexported(socket{}), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A table without end is read to its end, but not kept.
func TestParseTooMany(t *testing.T) {
	p := parser{family: unix.AF_INET, seq: 1, sockets: make([]socket, maxSockets-1)}
	row := message(unix.SOCK_DIAG_BY_FAMILY, 0, answer(v4))
	for range 3 {
		if done, err := p.parse(row); done || err != nil {
			t.Fatalf("%v, %v", done, err)
		}
	}
	if done, err := p.parse(message(unix.NLMSG_DONE, 0, nil)); !done || !errors.Is(err, errTooMany) || len(p.sockets) != maxSockets {
		t.Errorf("%v, %v, %d sockets", done, err, len(p.sockets))
	}
}

// fakeKernel answers each request with the next script.
type fakeKernel struct {
	scripts  [][]any // per request: datagrams or errors, in order
	requests []uint8 // families asked for
	queue    []any
}

func (k *fakeKernel) send(req []byte) error {
	k.requests = append(k.requests, req[headerSize])
	if len(k.queue) > 0 {
		// One dump at a time: the kernel goes on with the one that is not read yet.
		k.queue = append(k.queue, messageOf(binary.NativeEndian.Uint32(req[8:]), unix.NLMSG_ERROR, 0, errorBody(unix.EBUSY)))
		return nil
	}
	if len(k.scripts) == 0 {
		k.queue = append(k.queue, messageOf(binary.NativeEndian.Uint32(req[8:]), unix.NLMSG_DONE, 0, nil))
		return nil
	}
	for _, s := range k.scripts[0] {
		if b, ok := s.([]byte); ok {
			// Scripts are written with sequence 1, unless they are from another dump.
			if b = slices.Clone(b); binary.NativeEndian.Uint32(b[8:]) == 1 {
				copy(b[8:12], req[8:12])
			}
			s = b
		}
		k.queue = append(k.queue, s)
	}
	k.scripts = k.scripts[1:]
	return nil
}

func (k *fakeKernel) receive() ([]byte, error) {
	if len(k.queue) == 0 {
		return nil, unix.EAGAIN
	}
	next := k.queue[0]
	k.queue = k.queue[1:]
	if err, ok := next.(error); ok {
		return nil, err
	}
	return next.([]byte), nil
}

func (*fakeKernel) close() error { return nil }

// What the kernel could not finish is asked again a few times; what it refuses is
// said; nothing of an abandoned dump gets into the next one.
func TestReadRetries(t *testing.T) {
	row := message(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_MULTI, answer(v4))
	other := message(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_MULTI, answer(netip.MustParseAddrPort("127.0.0.1:1")))
	torn := message(unix.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP_INTR, answer(v4))
	done := message(unix.NLMSG_DONE, 0, nil)
	good := []any{row, done}
	fail := func(e unix.Errno) []any { return []any{message(unix.NLMSG_ERROR, 0, errorBody(e))} }
	const inet, inet6 = unix.AF_INET, unix.AF_INET6
	tests := []struct {
		name     string
		scripts  [][]any
		requests []uint8
		want     int // listeners
		err      string
	}{
		{"good", [][]any{good}, []uint8{inet, inet6}, 1, ""},
		{"in two datagrams", [][]any{{other, row, done}}, []uint8{inet, inet6}, 2, ""},
		{"out of memory, then good", [][]any{{unix.ENOBUFS}, good}, []uint8{inet, inet, inet6}, 1, ""},
		{"lost in the middle, then good", [][]any{{other, unix.ENOBUFS, other, done}, good}, []uint8{inet, inet, inet6}, 1, ""},
		{"changed, then good", [][]any{{other, torn, done}, good}, []uint8{inet, inet, inet6}, 1, ""},
		{"busy twice, then good", [][]any{fail(unix.EBUSY), fail(unix.EBUSY), good}, []uint8{inet, inet, inet, inet6}, 1, ""},
		{"no answer, then good", [][]any{{}, good}, []uint8{inet, inet, inet6}, 1, ""},
		{"the end is missing, then good", [][]any{{other}, good}, []uint8{inet, inet, inet6}, 1, ""},
		{"leftovers of another dump", [][]any{{messageOf(99, unix.NLMSG_DONE, 0, nil), row, done}}, []uint8{inet, inet6}, 1, ""},
		{"busy for ever", [][]any{fail(unix.EBUSY), fail(unix.EBUSY), fail(unix.EBUSY), good}, []uint8{inet, inet, inet}, 0, "device or resource busy"},
		{"malformed", [][]any{{other, []byte("12345678junk"), done}}, []uint8{inet}, 0, "malformed"},
		{"refused", [][]any{fail(unix.EPERM)}, []uint8{inet}, 0, "operation not permitted"},
		{"no tcp_diag", [][]any{fail(unix.ENOENT)}, []uint8{inet}, 0, "load the module tcp_diag"},
		{"no IPv6", [][]any{good, fail(unix.ENOENT)}, []uint8{inet, inet6}, 1, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			k := &fakeKernel{scripts: tt.scripts}
			table := &Table{path: "/pod", kernel: k}
			s, err := table.Read()
			switch {
			case tt.err == "" && err != nil:
				t.Errorf("error %v", err)
			case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err) || !strings.Contains(err.Error(), "the listen table of /pod")):
				t.Errorf("error %v, want %q with the path", err, tt.err)
			}
			if s.Len() != tt.want {
				t.Errorf("%d listeners, want %d", s.Len(), tt.want)
			}
			if diff := cmp.Diff(tt.requests, k.requests); diff != "" {
				t.Errorf("requests: %s", diff)
			}
			// Whatever went wrong, the next read is a fresh one.
			k.scripts = [][]any{good}
			if s, err := table.Read(); err != nil || s.Len() != 1 || !s.Listens(8080) {
				t.Errorf("next read: %v, %d listeners", err, s.Len())
			}
		})
	}
}

// FuzzParse: no datagram makes the parser panic, and what it takes is sound. The
// corpus holds real dumps of a kernel.
func FuzzParse(f *testing.F) {
	f.Add(slices.Concat(message(unix.SOCK_DIAG_BY_FAMILY, 0, answer(v6, attribute(attrV6Only, 1))), message(unix.NLMSG_DONE, 0, nil)), true)
	f.Add(message(unix.NLMSG_ERROR, 0, errorBody(unix.EBUSY)), false)
	f.Fuzz(func(t *testing.T, data []byte, isV6 bool) {
		p := parser{family: unix.AF_INET, seq: 1}
		if isV6 {
			p.family = unix.AF_INET6
		}
		before := slices.Clone(data)
		_, err := p.parse(data)
		if !slices.Equal(before, data) {
			t.Error("the input was changed")
		}
		if len(p.sockets)*(headerSize+answerSize) > len(data) {
			t.Errorf("%d sockets out of %d bytes", len(p.sockets), len(data))
		}
		if err != nil {
			return
		}
		s := newSnapshot(slices.Clone(p.sockets))
		for _, x := range p.sockets {
			port := x.addr.Port()
			if port == 0 || x.addr.Addr().Is4In6() || !x.addr.IsValid() {
				t.Errorf("took %v", x)
			}
			if s.Listens(port) == (s.OnlyOn(port) != nil) {
				t.Errorf("port %d: Listens %v, OnlyOn %v", port, s.Listens(port), s.OnlyOn(port))
			}
			if x.device == 0 && !s.Bound(x.addr) {
				t.Errorf("%v is not found", x)
			}
			if s.Everywhere(port) && !s.Listens(port) {
				t.Errorf("port %d listens everywhere but not at 127.0.0.1", port)
			}
		}
	})
}
