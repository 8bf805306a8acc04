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

// The request names 127.0.0.1, the port and lo, and no dump.
func TestLookupRequest(t *testing.T) {
	b := lookupRequest(0x1234, 7)
	want := make([]byte, 72)
	binary.NativeEndian.PutUint32(want, 72)
	binary.NativeEndian.PutUint16(want[4:], 20) // SOCK_DIAG_BY_FAMILY
	binary.NativeEndian.PutUint16(want[6:], 1)  // request
	binary.NativeEndian.PutUint32(want[8:], 7)
	want[16], want[17] = 2, 6 // AF_INET, IPPROTO_TCP
	binary.NativeEndian.PutUint32(want[20:], 1<<10)
	copy(want[24:], []byte{0x12, 0x34, 0, 0, 127, 0, 0, 1})
	binary.NativeEndian.PutUint32(want[60:], 1) // lo
	copy(want[64:], slices.Repeat([]byte{0xff}, 8))
	if diff := cmp.Diff(want, b[:]); diff != "" {
		t.Error(diff)
	}
}

// lookupKernel answers lookups from a script, by port.
type lookupKernel struct {
	fakeKernel
	answers map[uint16][]byte // messages with any sequence number
	sent    int               // datagrams
}

func (k *lookupKernel) send(req []byte) error {
	if binary.NativeEndian.Uint16(req[6:])&unix.NLM_F_DUMP != 0 {
		return k.fakeKernel.send(req)
	}
	k.sent++
	for r := range slices.Chunk(req, requestSize) {
		b := slices.Clone(k.answers[binary.BigEndian.Uint16(r[headerSize+8:])])
		if b == nil {
			b = message(unix.NLMSG_ERROR, 0, errorBody(unix.ENOENT))
		}
		copy(b[8:12], r[8:12])
		k.queue = append(k.queue, b)
	}
	return nil
}

// Each port has its own answer; anything that is not one is an error, after which
// the table is as good as new.
func TestLookup(t *testing.T) {
	row := func(addr string, attributes ...[]byte) []byte {
		return message(unix.SOCK_DIAG_BY_FAMILY, 0, answer(netip.MustParseAddrPort(addr), attributes...))
	}
	all := func(n int) (ports []uint16) {
		for i := range n {
			ports = append(ports, uint16(20000+i))
		}
		return ports
	}
	tests := []struct {
		name    string
		ports   []uint16
		answers map[uint16][]byte
		want    []uint16 // that listen
		sent    int
		err     string
	}{
		{"no ports", nil, nil, nil, 0, ""},
		{"none listens", []uint16{1, 2}, nil, nil, 1, ""},
		{"one listens", []uint16{1, 8080}, map[uint16][]byte{8080: row("127.0.0.1:8080")}, []uint16{8080}, 1, ""},
		{"dual-stack", []uint16{9090}, map[uint16][]byte{9090: row("[::]:9090", attribute(attrV6Only, 0))}, []uint16{9090}, 1, ""},
		{"more than fit in a datagram", all(100), map[uint16][]byte{20099: row("0.0.0.0:20099")}, []uint16{20099}, 4, ""},
		{"another port", []uint16{1}, map[uint16][]byte{1: row("127.0.0.1:2")}, nil, 1, "port 2 for port 1"},
		{"no listener", []uint16{1}, map[uint16][]byte{1: change(row("127.0.0.1:1"), headerSize+1, 1)}, nil, 1, "in state 1"},
		{"refused", []uint16{1}, map[uint16][]byte{1: message(unix.NLMSG_ERROR, 0, errorBody(unix.EPERM))}, nil, 1, "port 1: operation not permitted"},
		{"acknowledgement", []uint16{1}, map[uint16][]byte{1: message(unix.NLMSG_ERROR, 0, make([]byte, 4))}, nil, 1, "malformed"},
		{"short error", []uint16{1}, map[uint16][]byte{1: message(unix.NLMSG_ERROR, 0, nil)}, nil, 1, "error of 0 bytes"},
		{"unknown message", []uint16{1}, map[uint16][]byte{1: message(unix.NLMSG_DONE, 0, nil)}, nil, 1, "message of type 3"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			k := &lookupKernel{answers: tt.answers}
			table := &Table{path: "/pod", kernel: k}
			s, err := table.Lookup(tt.ports)
			switch {
			case tt.err == "" && err != nil:
				t.Errorf("error %v", err)
			case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err) || !strings.Contains(err.Error(), "listeners of /pod")):
				t.Errorf("error %v, want %q with the path", err, tt.err)
			}
			var got []uint16
			for _, p := range tt.ports {
				if s.Listens(p) {
					got = append(got, p)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
			if k.sent != tt.sent {
				t.Errorf("%d requests, want %d", k.sent, tt.sent)
			}
			k.answers = map[uint16][]byte{8080: row("0.0.0.0:8080")}
			if s, err := table.Lookup([]uint16{8080}); err != nil || !s.Listens(8080) {
				t.Errorf("next lookup: %v", err)
			}
		})
	}
}

// An answer of another request, or none, is no answer.
func TestLookupForeignAnswers(t *testing.T) {
	l := lookups{first: 5, ports: []uint16{1, 8080}, missing: 2}
	for seq, want := range map[uint32]int{4: 2, 7: 2, 0: 2, 6: 1} {
		l.missing, l.sockets = 2, nil
		if err := l.parse(messageOf(seq, unix.SOCK_DIAG_BY_FAMILY, 0, answer(v4))); err != nil {
			t.Fatal(err)
		}
		if l.missing != want || len(l.sockets) != 2-want {
			t.Errorf("sequence %d: %d missing, %d sockets; want %d missing", seq, l.missing, len(l.sockets), want)
		}
	}
	if _, err := (&Table{kernel: silentKernel{}}).Lookup([]uint16{1}); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("without an answer: %v", err)
	}
}

// silentKernel answers nothing.
type silentKernel struct{}

func (silentKernel) send([]byte) error { return nil }

func (silentKernel) receive() ([]byte, error) { return nil, unix.EAGAIN }

func (silentKernel) close() error { return nil }

// FuzzLookup: no datagram makes the parser panic or take what was not asked for.
func FuzzLookup(f *testing.F) {
	f.Add(messageOf(1, unix.SOCK_DIAG_BY_FAMILY, 0, answer(v4)))
	f.Add(messageOf(2, unix.SOCK_DIAG_BY_FAMILY, 0, answer(v6, attribute(attrV6Only, 1))))
	f.Add(messageOf(2, unix.NLMSG_ERROR, 0, errorBody(unix.ENOENT)))
	f.Fuzz(func(t *testing.T, data []byte) {
		l := lookups{first: 1, ports: []uint16{8080, 9090}, missing: 2}
		if err := l.parse(data); err != nil {
			return
		}
		for _, s := range l.sockets {
			if p := s.addr.Port(); p != 8080 && p != 9090 {
				t.Errorf("took port %d", p)
			}
		}
	})
}
