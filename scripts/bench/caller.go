package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/portolan-mesh/portolan/scripts/node"
)

// requestTime bounds one request.
const requestTime = 5 * time.Second

// caller sends requests out of a pod's network namespace from this process, so that
// no program has to start for one.
type caller struct {
	netns  string
	client *http.Client
}

// newCaller calls from pod. Without keepAlive each request asks DNS and opens a
// connection.
func newCaller(pod *node.Pod, keepAlive bool) *caller {
	c := &caller{netns: pod.Netns}
	c.client = &http.Client{Timeout: requestTime, Transport: &http.Transport{DialContext: c.dial, DisableKeepAlives: !keepAlive}}
	return c
}

// dial asks the pod's resolver and connects, all on one thread in the pod.
func (c *caller) dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("dial: %w", err)
	}
	return within(c.netns, func() (net.Conn, error) {
		ip, err := lookup(ctx, host)
		if err != nil {
			return nil, err
		}
		var d net.Dialer
		return d.DialContext(ctx, network, net.JoinHostPort(ip.String(), port))
	})
}

func lookup(ctx context.Context, name string) (netip.Addr, error) {
	var query dns.Msg
	query.SetQuestion(dns.Fqdn(name), dns.TypeA)
	var client dns.Client
	reply, _, err := client.ExchangeContext(ctx, &query, net.JoinHostPort(node.ResolverIP, "53"))
	if err != nil {
		return netip.Addr{}, fmt.Errorf("look %s up: %w", name, err)
	}
	for _, rr := range reply.Answer {
		if a, ok := rr.(*dns.A); ok {
			ip, _ := netip.AddrFromSlice(a.A)
			return ip.Unmap(), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("look %s up: %s", name, dns.RcodeToString[reply.Rcode])
}

// get sends one request and returns the status and the time it took.
func (c *caller) get(ctx context.Context, url string) (int, time.Duration, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return 0, 0, fmt.Errorf("get: %w", err)
	}
	begin := time.Now()
	resp, err := c.client.Do(req)
	if err != nil {
		return 0, 0, fmt.Errorf("get: %w", err)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	took := time.Since(begin)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return 0, 0, fmt.Errorf("get %s: %w", url, err)
	}
	return resp.StatusCode, took, nil
}

// until sends requests, one after the other, until one is answered with status, and
// returns when that was.
func (c *caller) until(ctx context.Context, url string, status int) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	for {
		got, _, err := c.get(ctx, url)
		if err != nil {
			return time.Time{}, fmt.Errorf("wait for %d: %w", status, err)
		}
		if got == status {
			return time.Now(), nil
		}
	}
}

// serve answers requests on this port of the loopback of a network namespace.
func serve(ctx context.Context, netns string, port int) (*http.Server, error) {
	listener, err := within(netns, func() (net.Listener, error) {
		var c net.ListenConfig
		return c.Listen(ctx, "tcp4", fmt.Sprintf("127.0.0.1:%d", port))
	})
	if err != nil {
		return nil, err
	}
	server := &http.Server{
		ReadHeaderTimeout: requestTime,
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }),
	}
	go func() { _ = server.Serve(listener) }() // ends by Close
	return server, nil
}
