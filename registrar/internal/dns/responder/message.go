package responder

import (
	"encoding/binary"

	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

// parsed is a query that is well-formed as a whole.
type parsed struct {
	msg   dns.Msg
	name  table.QueryName
	opt   *dns.OPT
	limit int
}

// parse reads the whole message. False when it has not exactly one question,
// more than one OPT record (RFC 6891, 6.1.1), or any part that cannot be read.
func parse(raw []byte, tcp bool) (*parsed, bool) {
	if binary.BigEndian.Uint16(raw[4:]) != 1 {
		return nil, false
	}
	p := &parsed{limit: minUDP}
	// The question is read here too: dns.Msg has it only as text, in which bytes
	// are escaped.
	end, ok := p.name.Parse(raw, headerSize)
	if !ok || end+4 > len(raw) {
		return nil, false
	}
	if err := p.msg.Unpack(raw); err != nil || len(p.msg.Question) != 1 {
		return nil, false
	}
	for _, rr := range p.msg.Extra {
		if opt, ok := rr.(*dns.OPT); ok {
			if p.opt != nil || opt.Hdr.Name != "." {
				return nil, false
			}
			p.opt = opt
		}
	}
	switch {
	case tcp:
		p.limit = MaxTCP
	case p.opt != nil:
		p.limit = max(minUDP, int(p.opt.UDPSize()))
	}
	return p, true
}

// rcode returns an empty reply with the code.
func (p *parsed) rcode(rcode int) *dns.Msg {
	m := &dns.Msg{}
	m.SetReply(&p.msg)
	m.Rcode = rcode
	m.RecursionAvailable = true
	m.Compress = true
	return m
}

// reply packs m as the answer to p, with an OPT record when the query had one
// (RFC 6891, 6.1.1), cut to what the client takes.
func (p *parsed) reply(m *dns.Msg, outcome Outcome) Decision {
	if p.opt != nil {
		m.SetEdns0(ownUDP, p.opt.Do())
	}
	out, err := m.Pack()
	if err == nil && len(out) > p.limit {
		m.Truncate(p.limit)
		out, err = m.Pack()
	}
	if err != nil || len(out) > p.limit {
		return Decision{Outcome: Dropped}
	}
	return Decision{Outcome: outcome, Reply: out, Limit: p.limit}
}

// ServerFailure is the answer to a query whose Outcome is Forwarded when it could
// not be: for people with a reason, as an extended error (RFC 8914), when the
// client speaks EDNS and there is room.
func (d Decision) ServerFailure(code uint16, reason string) []byte {
	m := d.query.rcode(dns.RcodeServerFailure)
	if d.query.opt != nil && reason != "" {
		m.SetEdns0(ownUDP, d.query.opt.Do())
		opt := m.IsEdns0()
		opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: code, ExtraText: reason})
		if out, err := m.Pack(); err == nil && len(out) <= d.query.limit {
			return out
		}
		m.Extra = nil
	}
	return d.query.reply(m, Forwarded).Reply
}

// Fit returns answer as it may be sent to a client that takes limit bytes. An
// answer that is larger keeps the records that fit and says that it is
// truncated, so that the client asks again over TCP. Nil when it is no answer.
func Fit(answer []byte, limit int) []byte {
	if len(answer) <= limit {
		return answer
	}
	m := &dns.Msg{}
	if err := m.Unpack(answer); err != nil {
		return nil
	}
	m.Truncate(limit)
	// Signed answers are left whole by Truncate, and so may others be in corners
	// that it counts differently.
	out, err := m.Pack()
	if err != nil || len(out) > limit {
		m.Answer, m.Ns, m.Extra, m.Truncated = nil, nil, nil, true
		if out, err = m.Pack(); err != nil || len(out) > limit {
			return nil
		}
	}
	return out
}
