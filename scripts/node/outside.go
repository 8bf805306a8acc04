package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The addresses of the world outside the mesh: on the node's lo, and reached
// from pods by their default route.
const (
	// ResolverIP is where the upstream resolver listens, on port 53; it is the
	// nameserver in the resolv.conf of pods.
	ResolverIP = "10.89.0.53"
	// WebIP is where OutsideName's web server listens, on port 80.
	WebIP = "10.89.0.80"
	// WebIP6 is its IPv6 address.
	WebIP6 = "fd00:89::80"
	// OutsideName is a name that is not the mesh's.
	OutsideName = "www.outside.test"
)

// outsideTTL is the TTL of the upstream resolver's answers, in seconds. It is
// odd so that an answer can be told from one of the mesh.
const outsideTTL = 77

// Outside is the world outside the mesh: a resolver that knows OutsideName and
// answers NXDOMAIN for everything else, and the web server behind that name.
type Outside struct {
	servers []func() error // stop each

	mu      sync.Mutex
	queries []string // guarded by mu; the names asked, in order
}

// startOutside adds the addresses to lo and serves on them.
func startOutside(ctx context.Context) (*Outside, error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find lo: %w", err)
	}
	for _, ip := range []string{ResolverIP + "/32", WebIP + "/32", WebIP6 + "/128"} {
		address, err := netlink.ParseAddr(ip)
		if err != nil {
			return nil, fmt.Errorf("parse %s: %w", ip, err)
		}
		// Without it an IPv6 address cannot be bound at once.
		address.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrReplace(lo, address); err != nil {
			return nil, fmt.Errorf("add %s to lo: %w", ip, err)
		}
	}
	o := &Outside{}
	if err := errors.Join(o.serveDNS(ctx), o.serveWeb(ctx)); err != nil {
		return nil, errors.Join(err, o.close())
	}
	return o, nil
}

// Queries are the names that were asked of the resolver, in order, in lower
// case and without the trailing dot.
func (o *Outside) Queries() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]string(nil), o.queries...)
}

// ForgetQueries empties the list of Queries.
func (o *Outside) ForgetQueries() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queries = nil
}

func (o *Outside) serveDNS(ctx context.Context) error {
	address := net.JoinHostPort(ResolverIP, "53")
	var config net.ListenConfig
	packets, err := config.ListenPacket(ctx, "udp", address)
	if err != nil {
		return fmt.Errorf("listen for DNS: %w", err)
	}
	listener, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return errors.Join(fmt.Errorf("listen for DNS: %w", err), packets.Close())
	}
	for _, server := range []*dns.Server{{PacketConn: packets}, {Listener: listener}} {
		server.Handler = dns.HandlerFunc(o.answer)
		started := make(chan struct{})
		server.NotifyStartedFunc = func() { close(started) }
		go func() { _ = server.ActivateAndServe() }()
		<-started // Shutdown of a server that has not started fails
		o.servers = append(o.servers, server.Shutdown)
	}
	return nil
}

// answer is the resolver.
func (o *Outside) answer(w dns.ResponseWriter, req *dns.Msg) {
	resp := new(dns.Msg)
	if len(req.Question) != 1 {
		_ = w.WriteMsg(resp.SetRcode(req, dns.RcodeFormatError))
		return
	}
	question := req.Question[0]
	name := strings.ToLower(strings.TrimSuffix(question.Name, "."))
	o.mu.Lock()
	o.queries = append(o.queries, name)
	o.mu.Unlock()

	resp.SetReply(req)
	resp.RecursionAvailable = true
	header := dns.RR_Header{Name: question.Name, Class: dns.ClassINET, Ttl: outsideTTL, Rrtype: question.Qtype}
	switch {
	case name != OutsideName:
		resp.Rcode = dns.RcodeNameError
	case question.Qtype == dns.TypeA:
		resp.Answer = []dns.RR{&dns.A{Hdr: header, A: netip.MustParseAddr(WebIP).AsSlice()}}
	case question.Qtype == dns.TypeAAAA:
		resp.Answer = []dns.RR{&dns.AAAA{Hdr: header, AAAA: netip.MustParseAddr(WebIP6).AsSlice()}}
	}
	if len(resp.Answer) == 0 {
		resp.Ns = []dns.RR{&dns.SOA{
			Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: outsideTTL},
			Ns:  "ns.outside.test.", Mbox: "admin.outside.test.", Serial: 1, Refresh: 60, Retry: 60, Expire: 60, Minttl: outsideTTL,
		}}
	}
	_ = w.WriteMsg(resp)
}

// serveWeb serves a page that tells which name was asked for and by whom.
func (o *Outside) serveWeb(ctx context.Context) error {
	var config net.ListenConfig
	for _, ip := range []string{WebIP, WebIP6} {
		listener, err := config.Listen(ctx, "tcp", net.JoinHostPort(ip, "80"))
		if err != nil {
			return fmt.Errorf("listen for the web: %w", err)
		}
		server := &http.Server{
			ReadHeaderTimeout: time.Minute,
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_ = json.NewEncoder(w).Encode(map[string]string{
					"outside": r.Host, "remote": r.RemoteAddr, "xfcc": r.Header.Get("X-Forwarded-Client-Cert"),
				})
			}),
		}
		go func() { _ = server.Serve(listener) }()
		o.servers = append(o.servers, server.Close)
	}
	return nil
}

func (o *Outside) close() error {
	var errs []error
	for _, stop := range o.servers {
		errs = append(errs, stop())
	}
	return errors.Join(errs...)
}
