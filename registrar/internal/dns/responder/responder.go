package responder

import (
	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

const (
	// headerSize is the size of a DNS header (RFC 1035, 4.1.1).
	headerSize = 12
	// MaxTCP is the largest message that fits behind a TCP length, in bytes.
	MaxTCP = dns.MaxMsgSize
	// minUDP is what every client takes over UDP, in bytes (RFC 1035, 4.2.1).
	minUDP = dns.MinMsgSize
	// ownUDP is what we announce to take over UDP, in bytes: no fragments on any path.
	ownUDP = 1232
	// ttl of a mesh address, in seconds. A service keeps its VIP for good, so any
	// value is right while the service lives; this one bounds how long a client
	// with a cache of its own goes on with a name that was withdrawn, or with a
	// real address it learned while nothing was captured, and a look-up costs
	// less than a millisecond.
	ttl = 5
	// negativeTTL is contract 2: a service that appears is found within a second.
	negativeTTL = 1
)

// Zone is where names are looked up; *table.Table is one.
type Zone interface {
	// Lookup takes a name in wire form and lower case, without the root.
	Lookup(name []byte) (table.VIP, table.Kind)
	// Settings tell the mesh domain.
	Settings() table.Settings
}

// Outcome is what was decided about a query. The values are the label values of
// the query counter.
type Outcome string

// The outcomes.
const (
	// Dropped queries are not answered: they are no queries, or cannot be told from answers.
	Dropped Outcome = "dropped"
	// Forwarded queries are not about the mesh.
	Forwarded Outcome = "forwarded"
	// Answered queries got an address, or the SOA record.
	Answered Outcome = "answered"
	// NoData: the name exists, the type does not.
	NoData Outcome = "nodata"
	// NameError: no such mesh name (NXDOMAIN).
	NameError Outcome = "nxdomain"
	// Refused: zone transfers, and ANY or a class other than IN for a mesh name.
	Refused Outcome = "refused"
	// Malformed queries got FORMERR.
	Malformed Outcome = "formerr"
	// Unsupported operations got NOTIMP, an unknown EDNS version BADVERS.
	Unsupported Outcome = "notimp"
)

// Query is one message from a pod.
type Query struct {
	// Raw is the message as it came; it is not modified or kept.
	Raw []byte
	// TCP is true when it came over TCP: then the size of an answer is not the client's to choose.
	TCP bool
	// IPv6 is true when the pod can use an IPv6 address.
	IPv6 bool
}

// Decision says what to do.
type Decision struct {
	// Outcome of the query.
	Outcome Outcome
	// Reply to send; nil when Outcome is Dropped or Forwarded.
	Reply []byte
	// Limit is the largest answer that the client takes, in bytes.
	Limit int

	query *parsed
}

// Responder answers from a zone. It has no state of its own.
type Responder struct {
	zone Zone
}

// New returns a responder for the zone.
func New(zone Zone) *Responder { return &Responder{zone: zone} }

// Respond decides about one query.
func (r *Responder) Respond(q Query) Decision {
	raw := q.Raw
	// What has no header or is an answer gets no answer: two servers that take
	// each other's errors for queries would never stop.
	if len(raw) < headerSize || raw[2]&0x80 != 0 {
		return Decision{Outcome: Dropped}
	}
	if opcode := raw[2] >> 3 & 0xf; opcode != dns.OpcodeQuery {
		return Decision{Outcome: Unsupported, Reply: headerReply(raw, dns.RcodeNotImplemented)}
	}
	p, ok := parse(raw, q.TCP)
	if !ok {
		return Decision{Outcome: Malformed, Reply: headerReply(raw, dns.RcodeFormatError)}
	}
	if p.opt != nil && p.opt.Version() != 0 {
		return p.reply(p.rcode(dns.RcodeBadVers), Unsupported)
	}
	qtype := p.msg.Question[0].Qtype
	// A transfer is a stream of messages that a forwarder cannot carry.
	if qtype == dns.TypeAXFR || qtype == dns.TypeIXFR {
		return p.reply(p.rcode(dns.RcodeRefused), Refused)
	}
	vip, kind := r.zone.Lookup(p.name.Bytes())
	if kind == table.Foreign {
		return Decision{Outcome: Forwarded, Limit: p.limit, query: p}
	}
	// RFC 8482: nobody needs ANY, and nothing in the mesh has another class.
	if qtype == dns.TypeANY || p.msg.Question[0].Qclass != dns.ClassINET {
		return p.reply(p.rcode(dns.RcodeRefused), Refused)
	}
	return r.answer(p, answerTo{vip: vip, kind: kind, ipv6: q.IPv6})
}

// answerTo is what is known about the name of a question.
type answerTo struct {
	vip  table.VIP
	kind table.Kind
	ipv6 bool
}

func (r *Responder) answer(p *parsed, to answerTo) Decision {
	m := p.rcode(dns.RcodeSuccess)
	m.Authoritative = true
	question := p.msg.Question[0]
	outcome := NoData
	switch {
	case to.kind == table.Unknown:
		m.Rcode = dns.RcodeNameError
		outcome = NameError
	case to.kind == table.Apex && question.Qtype == dns.TypeSOA:
		m.Answer = []dns.RR{soa(question.Name)}
		outcome = Answered
	case to.kind == table.Known && question.Qtype == dns.TypeA && to.vip.V4.IsValid():
		m.Answer = []dns.RR{&dns.A{Hdr: header(question.Name, dns.TypeA, ttl), A: to.vip.V4.AsSlice()}}
		outcome = Answered
	case to.kind == table.Known && question.Qtype == dns.TypeAAAA && to.vip.V6.IsValid() && to.ipv6:
		m.Answer = []dns.RR{&dns.AAAA{Hdr: header(question.Name, dns.TypeAAAA, ttl), AAAA: to.vip.V6.AsSlice()}}
		outcome = Answered
	}
	if outcome != Answered {
		m.Ns = []dns.RR{r.soaFor(question.Name)}
	}
	return p.reply(m, outcome)
}

// soaFor returns the SOA record that tells how long a negative answer holds. Its
// owner is the mesh domain, or the name itself for a known name elsewhere: an
// SOA record must lie above its question (RFC 2308, 3).
func (r *Responder) soaFor(qname string) dns.RR {
	domain := dns.Fqdn(r.zone.Settings().Domain)
	if len(domain) > 1 && dns.IsSubDomain(domain, qname) {
		return soa(domain)
	}
	return soa(qname)
}

func soa(zone string) dns.RR {
	return &dns.SOA{
		Hdr: header(zone, dns.TypeSOA, negativeTTL),
		Ns:  zone, Mbox: zone,
		// Nobody transfers the zone, so the serial and the timers of secondaries
		// mean nothing; the last one is what counts (RFC 2308, 4).
		Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: negativeTTL,
	}
}

func header(name string, rrtype uint16, seconds uint32) dns.RR_Header {
	return dns.RR_Header{Name: name, Rrtype: rrtype, Class: dns.ClassINET, Ttl: seconds}
}

// headerReply is the answer to a message of which only the header is trusted.
func headerReply(raw []byte, rcode int) []byte {
	reply := make([]byte, headerSize)
	copy(reply, raw[:2])
	// The client's opcode and RD; QR, and RA because we do forward.
	reply[2] = 0x80 | raw[2]&0x79
	reply[3] = 0x80 | byte(rcode)
	return reply
}
