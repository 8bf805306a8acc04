package forward

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/miekg/dns"
)

const (
	headerSize = 12
	// largestUDP is the largest answer that is read over UDP, in bytes; clients
	// that announce more are served over TCP. It bounds what a look-up holds.
	largestUDP = 4096
)

// errNotOurs marks a message that does not answer the query.
var errNotOurs = errors.New("answer to another question")

// ask sends the query to one resolver.
func (f *Forwarder) ask(ctx context.Context, server netip.AddrPort, req Request) ([]byte, error) {
	query := append([]byte(nil), req.Query...)
	// An ID and a source port of its own for every try: an answer that is
	// guessed must hit both. crypto/rand.Read never fails.
	_, _ = rand.Read(query[:2])
	if req.TCP {
		return f.askTCP(ctx, server, query)
	}
	reply, err := askUDP(ctx, server, query)
	if err != nil || !truncated(reply) {
		return reply, err
	}
	f.metrics.truncated.Inc()
	ctx, cancel := context.WithTimeout(ctx, f.tryInterval)
	defer cancel()
	if whole, err := f.askTCP(ctx, server, query); err == nil {
		return whole, nil
	}
	// What the resolver could say is better than nothing; the client asks again
	// over TCP, and then gets the error.
	return reply, nil
}

func truncated(msg []byte) bool { return msg[2]&0x02 != 0 }

// askUDP uses a socket of its own. Messages that do not answer the query are
// left alone: an attacker must not be able to end a look-up.
func askUDP(ctx context.Context, server netip.AddrPort, query []byte) ([]byte, error) {
	var d net.Dialer
	conn, err := d.DialUDP(ctx, "udp", netip.AddrPort{}, server)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := failOnDone(ctx, conn)
	defer stop()
	if _, err := conn.Write(query); err != nil {
		return nil, err
	}
	buf := make([]byte, largestUDP+1)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return nil, err
		}
		end, ok := answers(buf[:n], query)
		switch {
		case !ok:
		case n > largestUDP:
			return cut(buf, end), nil
		default:
			return buf[:n], nil
		}
	}
}

// cut returns what is left of an answer of which only the part up to the end of
// the question is whole: a truncated answer without records.
func cut(msg []byte, end int) []byte {
	msg[2] |= 0x02
	clear(msg[6:headerSize])
	return msg[:end]
}

// failOnDone makes reads and writes of conn fail when ctx ends. The function
// that it returns says false when they already were made to.
func failOnDone(ctx context.Context, conn net.Conn) func() bool {
	return context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
}

// askTCP reuses an idle connection when there is one. A connection that the
// resolver closed meanwhile is replaced by a fresh one.
func (f *Forwarder) askTCP(ctx context.Context, server netip.AddrPort, query []byte) ([]byte, error) {
	for {
		conn, reused, err := f.idle.get(ctx, server)
		if err != nil {
			return nil, err
		}
		reply, err := exchangeTCP(ctx, conn, query)
		if err == nil {
			f.idle.put(server, conn)
			return reply, nil
		}
		_ = conn.Close()
		if !reused || ctx.Err() != nil {
			return nil, err
		}
	}
}

// exchangeTCP sends one query and reads one answer. After an error the
// connection must be closed: what is read next may belong to this query.
func exchangeTCP(ctx context.Context, conn net.Conn, query []byte) ([]byte, error) {
	stop := failOnDone(ctx, conn)
	defer stop()
	frame := make([]byte, 2, 2+len(query))
	binary.BigEndian.PutUint16(frame, uint16(len(query)))
	if _, err := conn.Write(append(frame, query...)); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(conn, frame[:2]); err != nil {
		return nil, err
	}
	reply := make([]byte, binary.BigEndian.Uint16(frame))
	if _, err := io.ReadFull(conn, reply); err != nil {
		return nil, err
	}
	if _, ok := answers(reply, query); !ok {
		return nil, errNotOurs
	}
	if !stop() {
		return nil, ctx.Err()
	}
	return reply, nil
}

// answers says whether msg answers query: its ID, an answer, and the same
// question but for the case of letters, which some resolvers normalise. A
// refusal may come without any question. It returns where the question ends.
func answers(msg, query []byte) (end int, ok bool) {
	if len(msg) < headerSize || msg[0] != query[0] || msg[1] != query[1] || msg[2]&0x80 == 0 {
		return 0, false
	}
	switch binary.BigEndian.Uint16(msg[4:]) {
	case 0:
		return headerSize, msg[3]&0xf != dns.RcodeSuccess && msg[3]&0xf != dns.RcodeNameError
	case 1:
	default:
		return 0, false
	}
	end, ok = questionEnd(query)
	if !ok || len(msg) < end {
		return 0, false
	}
	// The bytes of lengths and types cannot be taken for letters of another case:
	// lengths are below 64, and type and class are compared exactly.
	for i := headerSize; i < end-4; i++ {
		if lower(msg[i]) != lower(query[i]) {
			return 0, false
		}
	}
	return end, bytes.Equal(msg[end-4:end], query[end-4:end])
}

// questionEnd returns the offset behind the first question of a message.
func questionEnd(msg []byte) (int, bool) {
	off := headerSize
	for off < len(msg) && msg[off] != 0 {
		if msg[off] > 63 {
			return 0, false
		}
		off += 1 + int(msg[off])
	}
	off += 1 + 4
	return off, off <= len(msg)
}

func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}
