package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/miekg/dns"
)

// lookupAnswer is a DNS answer as it came over the wire.
type lookupAnswer struct {
	Name string `json:"name"`
	Type string `json:"type"`
	// Rcode is NOERROR, NXDOMAIN and so on.
	Rcode string `json:"rcode"`
	// Addresses of the answer section.
	Addresses []string `json:"addresses"`
	// TTL is the lowest of the answer, or of the SOA for a negative answer, in seconds.
	TTL uint32 `json:"ttl"`
	// Authoritative says who answered: the owner of the name, or a cache.
	Authoritative bool `json:"authoritative"`
}

// lookupCommand asks the resolver of /etc/resolv.conf, without search domains
// and without a cache, so that the response code can be seen.
func lookupCommand(flags *flag.FlagSet) func(context.Context, []string, io.Writer) error {
	kind := flags.String("type", "A", "record type")
	network := flags.String("network", "udp", "udp or tcp")
	timeout := flags.Duration("timeout", 5*time.Second, "time for the query")
	config := flags.String("resolv-conf", "/etc/resolv.conf", "where the resolver's address is")
	return func(ctx context.Context, args []string, stdout io.Writer) error {
		if len(args) != 1 {
			return usageError{errors.New("lookup: want one name")}
		}
		qtype, ok := dns.StringToType[*kind]
		if !ok {
			return usageError{fmt.Errorf("lookup: unknown record type %q", *kind)}
		}
		resolver, err := dns.ClientConfigFromFile(*config)
		if err != nil {
			return fmt.Errorf("read %s: %w", *config, err)
		}
		if len(resolver.Servers) == 0 {
			return fmt.Errorf("%s names no nameserver", *config)
		}
		msg := new(dns.Msg)
		msg.SetQuestion(dns.Fqdn(args[0]), qtype)
		client := &dns.Client{Net: *network, Timeout: *timeout}
		server := net.JoinHostPort(resolver.Servers[0], resolver.Port)
		resp, _, err := client.ExchangeContext(ctx, msg, server)
		if err != nil {
			return fmt.Errorf("ask %s for %s: %w", server, args[0], err)
		}
		return printJSON(stdout, newLookupAnswer(args[0], *kind, resp))
	}
}

func newLookupAnswer(name, kind string, resp *dns.Msg) lookupAnswer {
	answer := lookupAnswer{
		Name:          name,
		Type:          kind,
		Rcode:         dns.RcodeToString[resp.Rcode],
		Addresses:     []string{},
		Authoritative: resp.Authoritative,
	}
	for _, rr := range resp.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			answer.Addresses = append(answer.Addresses, rr.A.String())
		case *dns.AAAA:
			answer.Addresses = append(answer.Addresses, rr.AAAA.String())
		}
	}
	for i, rr := range append(resp.Answer, resp.Ns...) {
		ttl := rr.Header().Ttl
		if soa, ok := rr.(*dns.SOA); ok {
			ttl = min(ttl, soa.Minttl)
		}
		if i == 0 || ttl < answer.TTL {
			answer.TTL = ttl
		}
	}
	return answer
}
