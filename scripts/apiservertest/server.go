// Package apiservertest runs a real Kubernetes API server with its etcd for a
// test, on a loopback address of its own, with RBAC, the Node authorizer and
// ValidatingAdmissionPolicy as in a cluster. No controller runs: nothing makes
// default ServiceAccounts, collects garbage or empties namespaces, unless the
// test does. Only tests import it.
//
//	server := apiservertest.Start(t)
//	admin := kubernetes.NewForConfigOrDie(server.Admin())
//	node1 := server.PodAccount(t, "portolan-system", "registrar", "node1")
//	server.Stop(t)    // the API is away
//	server.Restart(t) // and back, with everything it had
//
// Both programs end with the test, however it ends.
package apiservertest

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/scripts/programtest"
)

// patience bounds what a start or a stop takes; it matters only when something is
// broken.
const patience = time.Minute

// Server is an API server and its etcd. Its methods are for the goroutine of the
// test; the configurations may be used from any.
type Server struct {
	dir    string // credentials and logs
	addr   netip.Addr
	caPEM  []byte
	token  string // of the administrator
	flags  []string
	binary string

	etcd *programtest.Program
	api  *programtest.Program
}

// Start starts both programs and returns when the API server says that it is
// ready. They end with the test, whose failure shows the end of their logs.
// Flags are further flags of kube-apiserver, such as --feature-gates.
func Start(tb testing.TB, flags ...string) *Server {
	tb.Helper()
	s := &Server{dir: tb.TempDir(), token: rand.Text(), flags: flags, binary: programtest.Binary(tb, "HYPERKUBE", "hyperkube")}
	tb.Cleanup(func() { // after those of the programs
		for _, log := range []string{"etcd.log", "apiserver.log"} {
			if tb.Failed() {
				tb.Logf("the end of %s:\n%s", log, programtest.Tail(s.path(log), 30))
			}
		}
	})
	s.addr = programtest.FreeAddress(tb, slices.Collect(maps.Values(ports()))...)
	s.writeCredentials(tb)
	s.startEtcd(tb)
	s.Restart(tb)
	return s
}

// ports are fixed; the address is what differs between servers.
func ports() map[string]uint16 { return map[string]uint16{"api": 6443, "etcd": 2379, "peer": 2380} }

// at is a listener's address as HOST:PORT.
func (s *Server) at(listener string) string {
	return netip.AddrPortFrom(s.addr, ports()[listener]).String()
}

func (s *Server) path(name string) string { return filepath.Join(s.dir, name) }

func (s *Server) startEtcd(tb testing.TB) {
	tb.Helper()
	client, peer := "http://"+s.at("etcd"), "http://"+s.at("peer")
	s.etcd = programtest.Start(tb, s.path("etcd.log"), s.binary, "etcd",
		"--data-dir="+s.path("etcd"), "--unsafe-no-fsync",
		"--heartbeat-interval=20", "--election-timeout=100", // of the one member; the default waits a second
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer)
}

// Restart starts the API server when it does not run, with the etcd and the
// address that it had, and returns when it is ready.
func (s *Server) Restart(tb testing.TB) {
	tb.Helper()
	s.Stop(tb)
	s.api = programtest.Start(tb, s.path("apiserver.log"), s.binary, slices.Concat([]string{
		"kube-apiserver",
		"--etcd-servers=http://" + s.at("etcd"),
		"--bind-address=" + s.addr.String(), "--advertise-address=" + s.addr.String(), "--secure-port=" + fmt.Sprint(ports()["api"]),
		"--endpoint-reconciler-type=none", // the Service kubernetes cannot point to a loopback address
		"--tls-cert-file=" + s.path("server.crt"), "--tls-private-key-file=" + s.path("server.key"),
		"--token-auth-file=" + s.path("tokens.csv"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged",
		"--service-cluster-ip-range=10.202.0.0/24",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + s.path("account.pub"), "--service-account-signing-key-file=" + s.path("account.key"),
	}, s.flags)...)
	s.awaitReady(tb)
}

// Stop kills the API server: its connections are reset, and new ones refused. One
// that does not run is left so.
func (s *Server) Stop(tb testing.TB) {
	tb.Helper()
	if s.api != nil {
		s.api.Kill(tb)
		s.api = nil
	}
}

// Pause makes the API server hang: connections stay open and are still accepted by
// the kernel, and nobody answers. Resume, Stop and Restart end it.
func (s *Server) Pause(tb testing.TB) { tb.Helper(); s.api.Signal(tb, syscall.SIGSTOP) }

// Resume ends a Pause.
func (s *Server) Resume(tb testing.TB) { tb.Helper(); s.api.Signal(tb, syscall.SIGCONT) }

// awaitReady polls until the API server and all that it starts with are ready:
// nothing else tells it.
func (s *Server) awaitReady(tb testing.TB) {
	tb.Helper()
	client, err := rest.HTTPClientFor(s.Admin())
	if err != nil {
		tb.Fatal(err)
	}
	defer client.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	var last error
	for tick := time.NewTicker(20 * time.Millisecond); ; {
		if last = s.ready(ctx, client); last == nil {
			tick.Stop()
			return
		}
		select {
		case <-tick.C:
		case <-s.api.Ended():
			tb.Fatalf("the API server ended: %v", s.api.Err())
		case <-s.etcd.Ended():
			tb.Fatalf("etcd ended: %v", s.etcd.Err())
		case <-ctx.Done():
			tb.Fatalf("the API server is not ready after %s: %v", patience, last)
		}
	}
}

func (s *Server) ready(ctx context.Context, client *http.Client) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.Admin().Host+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("/readyz says %s", strings.ToLower(resp.Status))
	}
	return nil
}
