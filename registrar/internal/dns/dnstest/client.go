package dnstest

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// Patience bounds what a test waits for; it is far longer than anything takes.
const Patience = 15 * time.Second

// largestAnswer is the largest answer over UDP that tests read, in bytes.
const largestAnswer = 8192

// Dial connects from inside the namespace; the network is one of udp4, tcp4,
// udp6, tcp6. The connection is closed when the test ends.
func (n *Namespace) Dial(tb testing.TB, network, addr string) (*dns.Conn, error) {
	tb.Helper()
	var conn net.Conn
	var err error
	n.Do(tb, func() error {
		d := net.Dialer{Timeout: Patience}
		conn, err = d.DialContext(context.WithoutCancel(tb.Context()), network, addr)
		return nil
	})
	if err != nil {
		return nil, err
	}
	tb.Cleanup(func() { _ = conn.Close() })
	return &dns.Conn{Conn: conn, UDPSize: largestAnswer}, nil
}

// Exchange asks one question on the connection and waits for its answer.
func Exchange(tb testing.TB, conn *dns.Conn, q *dns.Msg, wait time.Duration) (*dns.Msg, error) {
	tb.Helper()
	if err := conn.SetDeadline(time.Now().Add(wait)); err != nil {
		return nil, err
	}
	if err := conn.WriteMsg(q); err != nil {
		return nil, err
	}
	for {
		m, err := conn.ReadMsg()
		// An answer to an earlier question, which was given up.
		if err == nil && m.Id != q.Id {
			continue
		}
		return m, err
	}
}

// Ask asks from inside the namespace, with a socket of its own.
func (n *Namespace) Ask(tb testing.TB, network, addr string, q *dns.Msg) (*dns.Msg, error) {
	tb.Helper()
	conn, err := n.Dial(tb, network, addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return Exchange(tb, conn, q, Patience)
}

// Question returns a query.
func Question(name string, qtype uint16) *dns.Msg {
	return new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype)
}

// Eventually calls check until it says "", and fails the test with what it says
// after Patience.
func Eventually(tb testing.TB, check func() string) {
	tb.Helper()
	deadline := time.Now().Add(Patience)
	for {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			tb.Fatal(problem)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
