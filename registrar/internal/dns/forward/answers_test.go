package forward

import (
	"bytes"
	"testing"

	"github.com/miekg/dns"
)

// Whatever bytes a resolver sends: no panic, and what is taken as an answer has
// the ID and is marked as an answer, and its question can be found.
func FuzzAnswers(f *testing.F) {
	m := new(dns.Msg)
	m.SetQuestion("example.com.", dns.TypeA)
	query, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	ok := bytes.Clone(query)
	ok[2] |= 0x80
	f.Add(ok)
	f.Add(ok[:12])
	f.Add(ok[:20])
	f.Add(query)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, msg []byte) {
		end, ok := answers(msg, query)
		if !ok {
			return
		}
		if end > len(msg) || !bytes.Equal(msg[:2], query[:2]) || msg[2]&0x80 == 0 {
			t.Fatalf("%x answers %x, its question ends at %d", msg, query, end)
		}
		if end > headerSize && !bytes.EqualFold(msg[headerSize:end-4], query[headerSize:end-4]) {
			t.Fatalf("%x is another question than %x", msg, query)
		}
		reply := new(dns.Msg)
		if err := reply.Unpack(cut(bytes.Clone(msg), end)); err != nil || !reply.Truncated || len(reply.Answer) > 0 {
			t.Fatalf("cut: %v, %v", reply, err)
		}
	})
}
