package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/api/port"
)

// An argument of serve means one server or is refused by a message that says why.
func TestParseListenSpec(t *testing.T) {
	tests := []struct {
		name    string
		arg     string
		want    listenSpec
		wantErr string
	}{
		{name: "http", arg: "http:8080", want: listenSpec{protocol: port.HTTP, number: 8080}},
		{name: "alias", arg: "grpc:9090", want: listenSpec{protocol: port.H2, number: 9090}},
		{
			name: "late, on loopback", arg: "tcp:5432,delay=3s,bind=127.0.0.1",
			want: listenSpec{protocol: port.TCP, number: 5432, delay: 3 * time.Second, bind: "127.0.0.1"},
		},
		{name: "no protocol", arg: "8080", wantErr: `"8080": want protocol:port`},
		{name: "unknown protocol", arg: "udp:53", wantErr: `unknown protocol "udp"`},
		{name: "bad port", arg: "http:0", wantErr: `port "0": no leading zero`},
		{name: "bad delay", arg: "http:80,delay=soon", wantErr: `invalid duration "soon"`},
		{name: "unknown option", arg: "http:80,tls=yes", wantErr: `unknown option "tls"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseListenSpec(tt.arg)
			if tt.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tt.wantErr) {
					t.Fatalf("parseListenSpec(%q) = %v, want an error with %q", tt.arg, err, tt.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(listenSpec{})); diff != "" {
				t.Errorf("parseListenSpec(%q) (-want +got):\n%s", tt.arg, diff)
			}
		})
	}
}

// Each client command reports which server of which pod answered it, over each
// of the protocols that a port may have.
func TestServersAndClients(t *testing.T) {
	ports := freePorts(t, 3)
	http, h2, tcp := "127.0.0.1:"+ports[0], "127.0.0.1:"+ports[1], "127.0.0.1:"+ports[2]
	startServers(t, "http:"+ports[0]+",bind=127.0.0.1", "h2:"+ports[1]+",bind=127.0.0.1", "tcp:"+ports[2]+",bind=127.0.0.1")

	tests := []struct {
		name string
		args []string
		want []string
	}{
		{name: "http/1.1", args: []string{"get", "-n", "3", "http://" + http + "/"}, want: []string{`"200 p1:` + ports[0] + `":3`}},
		{name: "h2c on an http port", args: []string{"get", "-h2", "http://" + http + "/"}, want: []string{`"200 p1:` + ports[0] + `":1`}},
		{name: "another address", args: []string{"get", "-dial", http, "http://nowhere.test/"}, want: []string{`"200 p1:` + ports[0] + `":1`}},
		{name: "a status", args: []string{"get", "http://" + http + "/status/418"}, want: []string{`"418 p1:` + ports[0] + `":1`}},
		{name: "h2c on an h2 port", args: []string{"get", "-h2", "http://" + h2 + "/"}, want: []string{`"200 p1:` + ports[1] + `":1`}},
		{name: "http/1.1 on an h2 port fails", args: []string{"get", "http://" + h2 + "/"}, want: []string{`"error: `}},
		{
			name: "grpc", args: []string{"grpc", h2},
			want: []string{`"code":"OK"`, `"health":"SERVING"`, `"pod":"p1"`, `"port":` + ports[1], `"authority":"` + h2 + `"`},
		},
		{
			name: "tcp", args: []string{"tcp", tcp, "abc"},
			want: []string{`"banner":"hello from p1 port ` + ports[2] + `"`, `"echo":"abc"`},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if code := run(t.Context(), tt.args, &stdout, &stderr); code != 0 {
				t.Fatalf("exit %d: %s", code, &stderr)
			}
			for _, want := range tt.want {
				if !strings.Contains(stdout.String(), want) {
					t.Errorf("printed %s, want it to contain %s", &stdout, want)
				}
			}
		})
	}
}

// A server with a delay refuses connections until the delay has passed.
func TestServeDelay(t *testing.T) {
	ports := freePorts(t, 2)
	startServers(t, "http:"+ports[0]+",bind=127.0.0.1", "http:"+ports[1]+",bind=127.0.0.1,delay=1h")
	if conn, err := net.Dial("tcp", "127.0.0.1:"+ports[1]); err == nil {
		_ = conn.Close()
		t.Errorf("port %s with a delay of an hour accepts connections", ports[1])
	}
}

// A call that the program does not understand exits 2 and says what it wants.
func TestUsage(t *testing.T) {
	for _, args := range [][]string{{}, {"dance"}, {"serve"}, {"serve", "8080"}, {"get"}, {"grpc"}, {"tcp"}, {"lookup"}, {"lookup", "-type", "Q", "x"}} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), args, &stdout, &stderr); code != 2 || stdout.Len() != 0 {
			t.Errorf("podserver %q: exit %d, printed %q, %q; want exit 2", args, code, &stdout, &stderr)
		}
	}
}

// Who asks for help gets it on standard output and exit status 0: every command with
// what it takes, and each command with its flags.
func TestHelp(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want []string
	}{
		{[]string{"--help"}, []string{"usage: podserver", "\n  serve ", "\n  get ", "\n  grpc ", "\n  tcp ", "\n  lookup "}},
		{[]string{"-h"}, []string{"usage: podserver"}},
		{[]string{"help"}, []string{"usage: podserver"}},
		{[]string{"serve", "--help"}, []string{"usage: podserver serve [FLAGS] PROTOCOL:PORT", "-name string"}},
		{[]string{"get", "-h"}, []string{"usage: podserver get [FLAGS] URL", "-keepalive"}},
		{[]string{"grpc", "--help"}, []string{"usage: podserver grpc [FLAGS] HOST:PORT", "-timeout"}},
		{[]string{"tcp", "--help"}, []string{"usage: podserver tcp [FLAGS] HOST:PORT", "-client-first"}},
		{[]string{"lookup", "--help"}, []string{"usage: podserver lookup [FLAGS] NAME", "-resolv-conf"}},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(t.Context(), tt.args, &stdout, &stderr); code != 0 || stderr.Len() != 0 {
			t.Errorf("podserver %q: exit %d, %q; want exit 0", tt.args, code, &stderr)
		}
		for _, want := range tt.want {
			if !strings.Contains(stdout.String(), want) {
				t.Errorf("podserver %q: %q is not in\n%s", tt.args, want, &stdout)
			}
		}
	}
}

// freePorts returns n ports of loopback that nothing listens on.
func freePorts(t *testing.T, n int) []string {
	t.Helper()
	ports := make([]string, n)
	for i := range ports {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		if _, ports[i], err = net.SplitHostPort(listener.Addr().String()); err != nil {
			t.Fatal(err)
		}
	}
	return ports
}

// startServers runs serve and returns when every server without a delay listens.
func startServers(t *testing.T, specs ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	reader, writer := io.Pipe()
	done := make(chan int, 1)
	var stderr bytes.Buffer
	go func() {
		done <- run(ctx, append([]string{"serve", "--name", "p1"}, specs...), writer, &stderr)
		_ = writer.Close()
	}()
	t.Cleanup(func() {
		cancel()
		if code := <-done; code != 0 {
			t.Errorf("serve: exit %d: %s", code, &stderr)
		}
	})
	immediate := 0
	for _, spec := range specs {
		if !strings.Contains(spec, "delay") {
			immediate++
		}
	}
	listening := make(chan struct{}, len(specs))
	go func() {
		defer close(listening)
		for lines := bufio.NewScanner(reader); lines.Scan(); {
			if strings.Contains(lines.Text(), "msg=listening") {
				listening <- struct{}{}
			}
		}
	}()
	for range immediate {
		if _, ok := <-listening; !ok {
			t.Fatalf("serve ended: %s", &stderr)
		}
	}
}
