package wiretest

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// Reply is what the echo server saw of a request.
type Reply struct {
	// Server is the name that the test gave the server.
	Server string
	Method string
	Proto  string
	Host   string
	// URI is the request target as it was on the wire.
	URI    string
	Header http.Header
	// Trailer are the request's trailers.
	Trailer http.Header
	// Bytes is the length of the body.
	Bytes int64
}

// Echo answers every request with what it saw, as JSON; name tells servers apart.
func Echo(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Server", name)
		_ = json.NewEncoder(w).Encode(Reply{
			Server: name, Method: r.Method, Proto: r.Proto, Host: r.Host, URI: r.RequestURI,
			Header: r.Header, Trailer: r.Trailer, Bytes: n,
		})
	})
}

// ServeHTTP serves HTTP/1.1 and h2c on an address inside the namespace until the
// test ends.
func (n *Namespace) ServeHTTP(tb testing.TB, address string, handler http.Handler) *http.Server {
	tb.Helper()
	l := n.Listen(tb, address)
	server := &http.Server{Handler: handler, Protocols: new(http.Protocols), ReadHeaderTimeout: time.Minute}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			tb.Errorf("serve on %s: %v", address, err)
		}
	}()
	tb.Cleanup(func() { _ = server.Close(); <-done })
	return server
}

// ServeTCP hands every connection to an address inside the namespace to f, in a
// goroutine of its own, until the test ends. The connection is closed when f returns.
func (n *Namespace) ServeTCP(tb testing.TB, address string, f func(*net.TCPConn)) net.Listener {
	tb.Helper()
	l := n.Listen(tb, address)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				f(c.(*net.TCPConn))
			}()
		}
	}()
	return l
}

// Client returns an HTTP client inside the namespace whose every connection goes
// to address, whatever the URL's host is. With h2c it speaks HTTP/2 at once.
func (n *Namespace) Client(tb testing.TB, address string, h2c bool) *http.Client {
	tb.Helper()
	transport := &http.Transport{
		Protocols:          new(http.Protocols),
		DisableCompression: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return n.DialContext(ctx, network, address)
		},
	}
	transport.Protocols.SetHTTP1(!h2c)
	transport.Protocols.SetUnencryptedHTTP2(h2c)
	tb.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: startTimeout}
}
