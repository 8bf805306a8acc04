package responder_test

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/responder"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

const (
	longLabel = "a23456789012345678901234567890123456789012345678901234567890123"
	// longName is a mesh name as long as names can be.
	longName = longLabel + "." + longLabel + "." + longLabel + ".a234567890123456789012345678901234567890123.aether.internal"
)

func newResponder(tb testing.TB) *responder.Responder {
	tb.Helper()
	t := table.New()
	both := table.VIP{V4: netip.MustParseAddr("198.18.0.1"), V6: netip.MustParseAddr("fd70:6f72:746f::1")}
	_, err := t.Apply(table.Change{
		Full:     true,
		Settings: &table.Settings{Domain: "aether.internal"},
		SetNames: map[string]table.VIP{
			"payments.aether.internal":         both,
			"payments.default.aether.internal": both,
			"only4.aether.internal":            {V4: both.V4},
			"only6.aether.internal":            {V6: both.V6},
			"ratings.partner.example":          {V4: both.V4},
			longName:                           both,
		},
	})
	if err != nil {
		tb.Fatal(err)
	}
	return responder.New(t)
}

// ask packs a question, lets change do more, and returns what is decided.
func ask(t *testing.T, name string, qtype uint16, change func(*dns.Msg, *responder.Query)) (responder.Decision, *dns.Msg) {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	q := responder.Query{IPv6: true}
	if change != nil {
		change(m, &q)
	}
	raw, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	q.Raw = raw
	before := bytes.Clone(raw)
	d := newResponder(t).Respond(q)
	if !bytes.Equal(before, raw) {
		t.Error("the query was modified")
	}
	if d.Reply == nil {
		return d, nil
	}
	r := new(dns.Msg)
	if err := r.Unpack(d.Reply); err != nil {
		t.Fatalf("unpack the reply: %v", err)
	}
	if r.Id != m.Id || !r.Response || !r.RecursionAvailable || r.RecursionDesired != m.RecursionDesired || r.CheckingDisabled != m.CheckingDisabled {
		t.Errorf("header %+v does not answer %+v", r.MsgHdr, m.MsgHdr)
	}
	if len(d.Reply) > d.Limit {
		t.Errorf("%d bytes, the client takes %d", len(d.Reply), d.Limit)
	}
	return d, r
}

const soaText = "aether.internal.\t1\tIN\tSOA\taether.internal. aether.internal. 1 3600 600 86400 1"

// Contract 2: mesh names get their VIP, unknown ones NXDOMAIN with a negative TTL
// of 1 s, AAAA of a pod without IPv6 and other types no data; capitals make no
// difference and come back as they were sent (0x20). XDS-70: a name below a
// service is no service. Everything else is forwarded, with what search lists
// make of mesh names.
func TestRespond(t *testing.T) {
	noIPv6 := func(_ *dns.Msg, q *responder.Query) { q.IPv6 = false }
	for _, tc := range []struct {
		name   string
		qname  string
		qtype  uint16
		change func(*dns.Msg, *responder.Query)
		want   responder.Outcome
		rcode  int
		answer string
		soa    string
	}{
		{name: "A", qname: "payments.aether.internal.", qtype: dns.TypeA, want: responder.Answered, answer: "payments.aether.internal.\t5\tIN\tA\t198.18.0.1"},
		{name: "AAAA", qname: "payments.aether.internal.", qtype: dns.TypeAAAA, want: responder.Answered, answer: "payments.aether.internal.\t5\tIN\tAAAA\tfd70:6f72:746f::1"},
		{name: "namespaced", qname: "payments.default.aether.internal.", qtype: dns.TypeA, want: responder.Answered, answer: "payments.default.aether.internal.\t5\tIN\tA\t198.18.0.1"},
		{name: "0x20", qname: "pAyMeNtS.AETHER.internal.", qtype: dns.TypeA, want: responder.Answered, answer: "pAyMeNtS.AETHER.internal.\t5\tIN\tA\t198.18.0.1"},
		{name: "longest name", qname: longName + ".", qtype: dns.TypeAAAA, want: responder.Answered, answer: longName + ".\t5\tIN\tAAAA\tfd70:6f72:746f::1"},
		{name: "imported name", qname: "ratings.partner.example.", qtype: dns.TypeA, want: responder.Answered, answer: "ratings.partner.example.\t5\tIN\tA\t198.18.0.1"},

		{name: "AAAA without IPv6", qname: "payments.aether.internal.", qtype: dns.TypeAAAA, change: noIPv6, want: responder.NoData, soa: soaText},
		{name: "A without IPv6", qname: "payments.aether.internal.", qtype: dns.TypeA, change: noIPv6, want: responder.Answered, answer: "payments.aether.internal.\t5\tIN\tA\t198.18.0.1"},
		{name: "A of a v6 service", qname: "only6.aether.internal.", qtype: dns.TypeA, want: responder.NoData, soa: soaText},
		{name: "AAAA of a v4 service", qname: "only4.aether.internal.", qtype: dns.TypeAAAA, want: responder.NoData, soa: soaText},
		{name: "HTTPS", qname: "payments.aether.internal.", qtype: dns.TypeHTTPS, want: responder.NoData, soa: soaText},
		{name: "SRV", qname: "payments.aether.internal.", qtype: dns.TypeSRV, want: responder.NoData, soa: soaText},
		{name: "unknown type", qname: "payments.aether.internal.", qtype: 65280, want: responder.NoData, soa: soaText},
		{name: "no data of an imported name", qname: "Ratings.partner.example.", qtype: dns.TypeTXT, want: responder.NoData, soa: strings.ReplaceAll(soaText, "aether.internal.", "Ratings.partner.example.")},
		{name: "namespace", qname: "default.aether.internal.", qtype: dns.TypeA, want: responder.NoData, soa: soaText},
		{name: "domain", qname: "aether.internal.", qtype: dns.TypeA, want: responder.NoData, soa: soaText},
		{name: "NS of the domain", qname: "aether.internal.", qtype: dns.TypeNS, want: responder.NoData, soa: soaText},
		{name: "SOA of the domain", qname: "aether.internal.", qtype: dns.TypeSOA, want: responder.Answered, answer: soaText},
		{name: "SOA of a name", qname: "payments.aether.internal.", qtype: dns.TypeSOA, want: responder.NoData, soa: soaText},

		{name: "ghost", qname: "ghost.aether.internal.", qtype: dns.TypeA, want: responder.NameError, rcode: dns.RcodeNameError, soa: soaText},
		{name: "ghost, AAAA without IPv6", qname: "GHOST.aether.internal.", qtype: dns.TypeAAAA, change: noIPv6, want: responder.NameError, rcode: dns.RcodeNameError, soa: soaText},
		{name: "pod below a service", qname: "pod-0.payments.default.aether.internal.", qtype: dns.TypeA, want: responder.NameError, rcode: dns.RcodeNameError, soa: soaText},
		{name: "service record", qname: "_grpc._tcp.payments.aether.internal.", qtype: dns.TypeSRV, want: responder.NameError, rcode: dns.RcodeNameError, soa: soaText},
		{name: "odd bytes", qname: `\000\255.aether.internal.`, qtype: dns.TypeA, want: responder.NameError, rcode: dns.RcodeNameError, soa: soaText},

		{name: "ANY", qname: "payments.aether.internal.", qtype: dns.TypeANY, want: responder.Refused, rcode: dns.RcodeRefused},
		{name: "class CHAOS", qname: "payments.aether.internal.", qtype: dns.TypeA, change: func(m *dns.Msg, _ *responder.Query) { m.Question[0].Qclass = dns.ClassCHAOS }, want: responder.Refused, rcode: dns.RcodeRefused},
		{name: "AXFR", qname: "aether.internal.", qtype: dns.TypeAXFR, want: responder.Refused, rcode: dns.RcodeRefused},
		{name: "AXFR elsewhere", qname: "example.com.", qtype: dns.TypeAXFR, want: responder.Refused, rcode: dns.RcodeRefused},
		{name: "IXFR elsewhere", qname: "example.com.", qtype: dns.TypeIXFR, want: responder.Refused, rcode: dns.RcodeRefused},

		{name: "elsewhere", qname: "example.com.", qtype: dns.TypeA, want: responder.Forwarded},
		{name: "root", qname: ".", qtype: dns.TypeNS, want: responder.Forwarded},
		{name: "ANY elsewhere", qname: "example.com.", qtype: dns.TypeANY, want: responder.Forwarded},
		{name: "class CHAOS elsewhere", qname: "version.bind.", qtype: dns.TypeTXT, change: func(m *dns.Msg, _ *responder.Query) { m.Question[0].Qclass = dns.ClassCHAOS }, want: responder.Forwarded},
		{name: "search list", qname: "payments.aether.internal.default.svc.cluster.local.", qtype: dns.TypeA, want: responder.Forwarded},
		{name: "dot inside a label", qname: `payments\.aether.internal.`, qtype: dns.TypeA, want: responder.Forwarded},
		{name: "not recursive", qname: "example.com.", qtype: dns.TypeA, change: func(m *dns.Msg, _ *responder.Query) { m.RecursionDesired = false }, want: responder.Forwarded},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, r := ask(t, tc.qname, tc.qtype, tc.change)
			if d.Outcome != tc.want {
				t.Fatalf("outcome %q, want %q", d.Outcome, tc.want)
			}
			if tc.want == responder.Forwarded {
				if r != nil {
					t.Errorf("a reply though it is forwarded: %v", r)
				}
				return
			}
			if r.Question[0].Name != tc.qname {
				t.Errorf("question %q, want %q", r.Question[0].Name, tc.qname)
			}
			if r.Rcode != tc.rcode || r.Authoritative == (tc.want == responder.Refused) {
				t.Errorf("rcode %d, authoritative %t", r.Rcode, r.Authoritative)
			}
			if d := cmp.Diff(tc.answer, records(r.Answer)); d != "" {
				t.Errorf("answer (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tc.soa, records(r.Ns)); d != "" {
				t.Errorf("authority (-want +got):\n%s", d)
			}
		})
	}
}

func records(list []dns.RR) string {
	var out []string
	for _, rr := range list {
		out = append(out, rr.String())
	}
	return strings.Join(out, "\n")
}

// RFC 6891: a query with EDNS gets an answer with EDNS, one without gets one
// without; what the client takes is respected, and never below 512; an unknown
// version is BADVERS. The DO bit comes back.
func TestRespondEDNS(t *testing.T) {
	edns := func(size uint16, do bool) func(*dns.Msg, *responder.Query) {
		return func(m *dns.Msg, _ *responder.Query) { m.SetEdns0(size, do) }
	}
	for _, tc := range []struct {
		name   string
		change func(*dns.Msg, *responder.Query)
		limit  int
		opt    bool
		do     bool
	}{
		{name: "none", limit: 512},
		{name: "1232", change: edns(1232, false), limit: 1232, opt: true},
		{name: "do", change: edns(4096, true), limit: 4096, opt: true, do: true},
		{name: "too small", change: edns(100, false), limit: 512, opt: true},
		{name: "largest", change: edns(65535, false), limit: 65535, opt: true},
		{name: "TCP", change: func(_ *dns.Msg, q *responder.Query) { q.TCP = true }, limit: 65535},
		{name: "TCP with a size", change: func(m *dns.Msg, q *responder.Query) { m.SetEdns0(512, false); q.TCP = true }, limit: 65535, opt: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, name := range []string{"payments.aether.internal.", "ghost.aether.internal.", longName + "."} {
				d, r := ask(t, name, dns.TypeA, tc.change)
				if d.Limit != tc.limit {
					t.Errorf("limit %d, want %d", d.Limit, tc.limit)
				}
				opt := r.IsEdns0()
				if (opt != nil) != tc.opt {
					t.Fatalf("EDNS %v, want %t", opt, tc.opt)
				}
				if opt != nil && (opt.Do() != tc.do || opt.UDPSize() != 1232 || opt.Version() != 0) {
					t.Errorf("EDNS %v", opt)
				}
				if r.Truncated {
					t.Errorf("truncated at %d bytes", len(d.Reply))
				}
			}
			if d, _ := ask(t, "example.com.", dns.TypeA, tc.change); d.Limit != tc.limit || d.Outcome != responder.Forwarded {
				t.Errorf("forwarded: %+v, want limit %d", d, tc.limit)
			}
		})
	}
	d, r := ask(t, "payments.aether.internal.", dns.TypeA, func(m *dns.Msg, _ *responder.Query) {
		m.SetEdns0(1232, false)
		m.IsEdns0().SetVersion(1)
	})
	if d.Outcome != responder.Unsupported || r.Rcode != dns.RcodeBadVers || len(r.Answer) != 0 || r.IsEdns0().Version() != 0 {
		t.Errorf("version 1: %s, %v", d.Outcome, r)
	}
}

// wire builds a message from a header's fields and a rest.
func wire(flags uint16, counts [4]uint16, rest string) []byte {
	b := binary.BigEndian.AppendUint16([]byte{0xbe, 0xef}, flags)
	for _, n := range counts {
		b = binary.BigEndian.AppendUint16(b, n)
	}
	return append(b, rest...)
}

const (
	question = "\x08payments\x06aether\x08internal\x00\x00\x01\x00\x01"
	optRR    = "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"
)

// malformed are messages that are no well-formed query, with what they get.
func malformed() []struct {
	name  string
	raw   []byte
	want  responder.Outcome
	rcode int
} {
	type row = struct {
		name  string
		raw   []byte
		want  responder.Outcome
		rcode int
	}
	formerr, notimp := dns.RcodeFormatError, dns.RcodeNotImplemented
	return []row{
		{name: "nothing", raw: nil, want: responder.Dropped},
		{name: "one byte", raw: []byte{1}, want: responder.Dropped},
		{name: "short header", raw: wire(0x0100, [4]uint16{1}, "")[:11], want: responder.Dropped},
		{name: "an answer", raw: wire(0x8180, [4]uint16{1}, question), want: responder.Dropped},
		{name: "an answer of another operation", raw: wire(0xa800, [4]uint16{1}, question), want: responder.Dropped},
		{name: "NOTIFY", raw: wire(0x2000, [4]uint16{1}, question), want: responder.Unsupported, rcode: notimp},
		{name: "UPDATE", raw: wire(0x2800, [4]uint16{1}, question), want: responder.Unsupported, rcode: notimp},
		{name: "operation 15", raw: wire(0x7800, [4]uint16{1}, ""), want: responder.Unsupported, rcode: notimp},
		{name: "no question", raw: wire(0x0100, [4]uint16{}, ""), want: responder.Malformed, rcode: formerr},
		{name: "no question but EDNS", raw: wire(0x0100, [4]uint16{0, 0, 0, 1}, optRR), want: responder.Malformed, rcode: formerr},
		{name: "two questions", raw: wire(0x0100, [4]uint16{2}, question+question), want: responder.Malformed, rcode: formerr},
		{name: "question missing", raw: wire(0x0100, [4]uint16{1}, ""), want: responder.Malformed, rcode: formerr},
		{name: "many questions missing", raw: wire(0x0100, [4]uint16{65535, 65535, 65535, 65535}, ""), want: responder.Malformed, rcode: formerr},
		{name: "question cut in its name", raw: wire(0x0100, [4]uint16{1}, question[:10]), want: responder.Malformed, rcode: formerr},
		{name: "question cut in its class", raw: wire(0x0100, [4]uint16{1}, question[:len(question)-1]), want: responder.Malformed, rcode: formerr},
		{name: "name points to the header", raw: wire(0x0100, [4]uint16{1}, "\xc0\x04\x00\x01\x00\x01"), want: responder.Malformed, rcode: formerr},
		{name: "name points to itself", raw: wire(0x0100, [4]uint16{1}, "\xc0\x0c\x00\x01\x00\x01"), want: responder.Malformed, rcode: formerr},
		{name: "label then pointer", raw: wire(0x0100, [4]uint16{1}, "\x01a\xc0\x0c\x00\x01\x00\x01"), want: responder.Malformed, rcode: formerr},
		{name: "label of reserved length", raw: wire(0x0100, [4]uint16{1}, "\x41"+strings.Repeat("a", 65)+"\x00\x00\x01\x00\x01"), want: responder.Malformed, rcode: formerr},
		{name: "name of 256 bytes", raw: wire(0x0100, [4]uint16{1}, strings.Repeat("\x3f"+longLabel, 4)+"\x00\x00\x01\x00\x01"), want: responder.Malformed, rcode: formerr},
		{name: "record cut off", raw: wire(0x0100, [4]uint16{1, 0, 0, 1}, question+optRR[:5]), want: responder.Malformed, rcode: formerr},
		{name: "record longer than the message", raw: wire(0x0100, [4]uint16{1, 0, 0, 1}, question+optRR[:9]+"\xff\xff"), want: responder.Malformed, rcode: formerr},
		{name: "two EDNS records", raw: wire(0x0100, [4]uint16{1, 0, 0, 2}, question+optRR+optRR), want: responder.Malformed, rcode: formerr},
		{name: "EDNS record with a name", raw: wire(0x0100, [4]uint16{1, 0, 0, 1}, question+"\x01a"+optRR), want: responder.Malformed, rcode: formerr},
	}
}

// What is no query is dropped or refused by its header alone, whatever it is:
// no crash, no answer to an answer (loops), no answer larger than a header.
func TestRespondMalformed(t *testing.T) {
	for _, tc := range malformed() {
		t.Run(tc.name, func(t *testing.T) {
			d := newResponder(t).Respond(responder.Query{Raw: tc.raw})
			if d.Outcome != tc.want {
				t.Fatalf("outcome %q, want %q", d.Outcome, tc.want)
			}
			if tc.want == responder.Dropped {
				if d.Reply != nil {
					t.Errorf("reply %x", d.Reply)
				}
				return
			}
			r := new(dns.Msg)
			if err := r.Unpack(d.Reply); err != nil || len(d.Reply) != 12 {
				t.Fatalf("reply %x: %v", d.Reply, err)
			}
			if !bytes.Equal(d.Reply[:2], tc.raw[:2]) || !r.Response || r.Rcode != tc.rcode || r.Opcode != int(tc.raw[2]>>3&0xf) {
				t.Errorf("header %+v", r.MsgHdr)
			}
		})
	}
}

// A failed look-up says why to people who ask with EDNS (RFC 8914), and fits
// what the client takes also when the reason is long.
func TestServerFailure(t *testing.T) {
	edns := func(m *dns.Msg, _ *responder.Query) { m.SetEdns0(512, false) }
	for _, tc := range []struct {
		name   string
		change func(*dns.Msg, *responder.Query)
		reason string
		want   string
		opt    bool
	}{
		{name: "plain", reason: "why"},
		{name: "EDNS", change: edns, reason: "why", want: "why", opt: true},
		{name: "no reason", change: edns, opt: true},
		{name: "long reason", change: edns, reason: strings.Repeat("x", 600), opt: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, _ := ask(t, "eXample.com.", dns.TypeA, tc.change)
			out := d.ServerFailure(dns.ExtendedErrorCodeNoReachableAuthority, tc.reason)
			r := new(dns.Msg)
			if err := r.Unpack(out); err != nil || len(out) > 512 {
				t.Fatalf("%d bytes, %v", len(out), err)
			}
			if !r.Response || r.Rcode != dns.RcodeServerFailure || r.Question[0].Name != "eXample.com." {
				t.Errorf("reply %v", r)
			}
			opt := r.IsEdns0()
			if (opt != nil) != tc.opt {
				t.Fatalf("EDNS %v, want %t", opt, tc.opt)
			}
			got := ""
			if opt != nil && len(opt.Option) == 1 {
				got = opt.Option[0].(*dns.EDNS0_EDE).ExtraText
			}
			if got != tc.want {
				t.Errorf("reason %q, want %q", got, tc.want)
			}
		})
	}
}

// An answer of a resolver never reaches a client larger than it asked for: what
// does not fit is left out, and the client told to ask over TCP.
func TestFit(t *testing.T) {
	m := new(dns.Msg)
	m.SetQuestion("example.com.", dns.TypeTXT)
	m.Response = true
	m.Compress = true
	for range 40 {
		m.Answer = append(m.Answer, &dns.TXT{Hdr: dns.RR_Header{Name: "example.com.", Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{strings.Repeat("t", 100)}})
	}
	m.SetEdns0(4096, true)
	raw, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	m.Extra = append(m.Extra, &dns.TSIG{Hdr: dns.RR_Header{Name: "key.", Rrtype: dns.TypeTSIG, Class: dns.ClassANY}, Algorithm: dns.HmacSHA256, MACSize: 32, MAC: strings.Repeat("00", 32)})
	signed, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	if got := responder.Fit(raw, len(raw)); !bytes.Equal(got, raw) {
		t.Error("an answer that fits was changed")
	}
	for name, in := range map[string][]byte{"plain": raw, "signed": signed} {
		for _, limit := range []int{512, 1232, 4000} {
			out := responder.Fit(in, limit)
			r := new(dns.Msg)
			if err := r.Unpack(out); err != nil || len(out) > limit {
				t.Fatalf("%s, %d: %d bytes, %v", name, limit, len(out), err)
			}
			if !r.Truncated || r.Id != m.Id || r.Question[0].Name != "example.com." {
				t.Errorf("%s, %d: %v", name, limit, r.MsgHdr)
			}
			if name == "plain" && (len(r.Answer) < limit/150 || r.IsEdns0() == nil) {
				t.Errorf("%s, %d: %d records, EDNS %v", name, limit, len(r.Answer), r.IsEdns0())
			}
		}
	}
	if out := responder.Fit(bytes.Repeat([]byte{0xff}, 600), 512); out != nil {
		t.Errorf("garbage became %x", out)
	}
}

// Whatever bytes a pod sends: no panic, one decision, a reply that is a reply to
// it and not larger than it takes, and never an answer to an answer.
func FuzzRespond(f *testing.F) {
	for _, tc := range malformed() {
		f.Add(tc.raw, false)
	}
	for _, name := range []string{"payments.aether.internal.", "ghost.aether.internal.", "aether.internal.", "example.com.", `\000\046.aether.internal.`, longName + "."} {
		m := new(dns.Msg)
		m.SetQuestion(name, dns.TypeAAAA)
		m.SetEdns0(1232, true)
		opt := m.IsEdns0()
		opt.Option = append(opt.Option, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0123456789abcdef"})
		raw, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw, true)
	}
	r := newResponder(f)
	f.Fuzz(func(t *testing.T, raw []byte, tcp bool) {
		before := bytes.Clone(raw)
		d := r.Respond(responder.Query{Raw: raw, TCP: tcp, IPv6: true})
		if !bytes.Equal(before, raw) {
			t.Fatal("the query was modified")
		}
		switch d.Outcome {
		case responder.Dropped, responder.Forwarded:
			if d.Reply != nil {
				t.Fatalf("%s with a reply", d.Outcome)
			}
		default:
			checkReply(t, raw, d)
		}
		if d.Outcome == responder.Forwarded {
			d.Reply = d.ServerFailure(0, "fuzz")
			checkReply(t, raw, d)
		}
	})
}

func checkReply(t *testing.T, raw []byte, d responder.Decision) {
	t.Helper()
	if len(raw) < 12 || raw[2]&0x80 != 0 {
		t.Fatalf("reply to what is no query")
	}
	m := new(dns.Msg)
	if err := m.Unpack(d.Reply); err != nil {
		t.Fatalf("reply %x: %v", d.Reply, err)
	}
	if !bytes.Equal(d.Reply[:2], raw[:2]) || !m.Response {
		t.Fatalf("header %x does not answer %x", d.Reply[:12], raw[:12])
	}
	if len(d.Reply) > max(12, d.Limit) {
		t.Fatalf("%d bytes, the client takes %d", len(d.Reply), d.Limit)
	}
}

// Whatever bytes a resolver sends, what goes on to the client is a message that fits.
func FuzzFit(f *testing.F) {
	f.Add([]byte{}, 512)
	m := new(dns.Msg)
	m.SetQuestion("example.com.", dns.TypeA)
	raw, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(append(raw, make([]byte, 600)...), 512)
	f.Fuzz(func(t *testing.T, raw []byte, limit int) {
		limit = max(512, limit)
		if out := responder.Fit(raw, limit); len(out) > limit {
			t.Fatalf("%d bytes, the client takes %d", len(out), limit)
		}
	})
}

func BenchmarkRespond(b *testing.B) {
	r := newResponder(b)
	for _, name := range []string{"payments.aether.internal.", "ghost.aether.internal.", "example.com."} {
		b.Run(name, func(b *testing.B) {
			m := new(dns.Msg)
			m.SetQuestion(name, dns.TypeA)
			m.SetEdns0(1232, false)
			raw, err := m.Pack()
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				r.Respond(responder.Query{Raw: raw})
			}
		})
	}
}
