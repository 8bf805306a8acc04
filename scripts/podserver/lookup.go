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

	"github.com/portolan-mesh/portolan/scripts/answer"
)

// lookupCommand asks the resolver of /etc/resolv.conf, without search domains
// and without a cache, so that the response code can be seen.
func lookupCommand(flags *flag.FlagSet) func(context.Context, []string, io.Writer) error {
	kind := flags.String("type", "A", "record type")
	network := flags.String("network", "udp", "udp or tcp")
	timeout := flags.Duration("timeout", 5*time.Second, "time for the query")
	every := flags.Duration("every", 0, "ask again and again with this pause, through one socket, and print a line for each")
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
		if *every > 0 {
			conn, err := client.DialContext(ctx, server)
			if err != nil {
				return fmt.Errorf("open a socket to %s: %w", server, err)
			}
			defer conn.Close()
			return lookupEvery(ctx, *every, func() (*dns.Msg, error) {
				msg.Id = dns.Id()
				resp, _, err := client.ExchangeWithConnContext(ctx, msg, conn)
				return resp, err
			}, func(got answer.DNS) error {
				got.Name, got.Type = args[0], *kind
				return printJSON(stdout, got)
			})
		}
		resp, _, err := client.ExchangeContext(ctx, msg, server)
		if err != nil {
			return fmt.Errorf("ask %s for %s: %w", server, args[0], err)
		}
		return printJSON(stdout, newDNSAnswer(args[0], *kind, resp))
	}
}

// lookupEvery asks until ctx ends; a query that fails costs nothing but its line.
func lookupEvery(ctx context.Context, pause time.Duration, ask func() (*dns.Msg, error), say func(answer.DNS) error) error {
	ticker := time.NewTicker(pause)
	defer ticker.Stop()
	for {
		got := answer.DNS{Addresses: []string{}}
		if resp, err := ask(); err != nil {
			got.Error = err.Error()
		} else {
			got = newDNSAnswer("", "", resp)
		}
		if err := say(got); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func newDNSAnswer(name, kind string, resp *dns.Msg) answer.DNS {
	got := answer.DNS{
		Name:          name,
		Type:          kind,
		Rcode:         dns.RcodeToString[resp.Rcode],
		Addresses:     []string{},
		Authoritative: resp.Authoritative,
	}
	for _, rr := range resp.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			got.Addresses = append(got.Addresses, rr.A.String())
		case *dns.AAAA:
			got.Addresses = append(got.Addresses, rr.AAAA.String())
		}
	}
	for i, rr := range append(resp.Answer, resp.Ns...) {
		ttl := rr.Header().Ttl
		if soa, ok := rr.(*dns.SOA); ok {
			ttl = min(ttl, soa.Minttl)
		}
		if i == 0 || ttl < got.TTL {
			got.TTL = ttl
		}
	}
	return got
}
