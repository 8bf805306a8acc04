// Package spiretest runs a real spire-server with one real spire-agent for a test,
// on a loopback address and Unix sockets of their own. The user that runs the test is
// an authorized delegate of the agent. Only tests import it.
//
//	s := spiretest.Start(t, "mesh.example")
//	s.Register(t, spiretest.Entry{ID: "spiffe://mesh.example/ns/shop/sa/web", Selectors: []string{"k8s:ns:shop", "k8s:sa:web"}})
//	s.StopAgent(t)  // SIGKILL
//	s.StartAgent(t) // and back, as the same node
//
// Both programs end with the test, however it ends.
package spiretest

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/scripts/programtest"
)

// patience bounds a start and a call; it matters only when something is broken.
const patience = time.Minute

const serverPort = 8081

// SPIRE is a server and an agent. Its methods are for the goroutine of the test.
type SPIRE struct {
	// AdminSocket is the agent's, with the Delegated Identity API.
	AdminSocket string
	// DelegateEntry is the entry ID of the test's user.
	DelegateEntry string

	dir             string
	trustDomain     string
	serverProgram   string
	agentProgram    string
	server, current *programtest.Program
}

// Entry is a registration entry of the agent's node.
type Entry struct {
	// ID is the SPIFFE ID.
	ID string
	// Selectors are TYPE:VALUE.
	Selectors []string
	// Lifetime of the X.509 SVIDs, in whole seconds; 0 is the server's default, an hour.
	Lifetime time.Duration
}

// Start starts both programs and returns when they say that they are well. They end
// with the test, whose failure shows the end of their logs.
func Start(tb testing.TB, trustDomain string) *SPIRE {
	tb.Helper()
	dir, err := os.MkdirTemp("", "spire") //nolint:usetesting // the test's name would make the sockets' too long
	if err != nil {
		tb.Fatal(err)
	}
	s := &SPIRE{
		AdminSocket: filepath.Join(dir, "private", "admin.sock"), dir: dir, trustDomain: trustDomain,
		serverProgram: programtest.Binary(tb, "SPIRE_SERVER", "spire-server"),
		agentProgram:  programtest.Binary(tb, "SPIRE_AGENT", "spire-agent"),
	}
	tb.Cleanup(func() { // after those of the programs
		for _, log := range []string{"server.log", "agent.log"} {
			if tb.Failed() {
				tb.Logf("the end of %s:\n%s", log, programtest.Tail(s.path(log), 40))
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	addr := programtest.FreeAddress(tb, serverPort)
	s.startServer(tb, addr)
	out := s.Server(tb, "token", "generate", "-output", "json", "-spiffeID", s.node())
	var token struct {
		Value string `json:"value"`
	}
	if err := json.Unmarshal(out, &token); err != nil {
		tb.Fatalf("join token: %v in %s", err, out)
	}
	delegate := "spiffe://" + trustDomain + "/delegate"
	s.write(tb, "agent.conf", fmt.Sprintf(`
agent {
  trust_domain = %q
  data_dir = %q
  log_level = "DEBUG"
  server_address = %q
  server_port = %d
  insecure_bootstrap = true
  join_token = %q
  socket_path = %q
  admin_socket_path = %q
  authorized_delegates = [%q]
  experimental { sync_interval = "1s" }
}
plugins {
  KeyManager "disk" { plugin_data { directory = %q } }
  NodeAttestor "join_token" { plugin_data {} }
  WorkloadAttestor "unix" { plugin_data {} }
}
`, trustDomain, s.path("agent"), addr, serverPort, token.Value, s.path("workload/api.sock"), s.AdminSocket, delegate, s.path("agent")))
	s.DelegateEntry = s.Register(tb, Entry{ID: delegate, Selectors: []string{"unix:uid:" + strconv.Itoa(os.Geteuid())}})
	s.StartAgent(tb)
	return s
}

// node is the alias of the agent's node, which the entries belong to.
func (s *SPIRE) node() string { return "spiffe://" + s.trustDomain + "/node" }

func (s *SPIRE) path(name string) string { return filepath.Join(s.dir, name) }

func (s *SPIRE) write(tb testing.TB, name, content string) {
	tb.Helper()
	if err := os.WriteFile(s.path(name), []byte(content), 0o600); err != nil {
		tb.Fatal(err)
	}
}

func (s *SPIRE) startServer(tb testing.TB, addr netip.Addr) {
	tb.Helper()
	s.write(tb, "server.conf", fmt.Sprintf(`
server {
  trust_domain = %q
  data_dir = %q
  log_level = "INFO"
  bind_address = %q
  bind_port = %d
  socket_path = %q
}
plugins {
  DataStore "sql" { plugin_data { database_type = "sqlite3" connection_string = %q } }
  KeyManager "memory" { plugin_data {} }
  NodeAttestor "join_token" { plugin_data {} }
}
`, s.trustDomain, s.path("server"), addr, serverPort, s.serverSocket(), s.path("server.sqlite3")))
	s.server = programtest.Start(tb, s.path("server.log"), s.serverProgram, "run", "-config", s.path("server.conf"))
	s.await(tb, s.server, s.serverProgram, "healthcheck", "-socketPath", s.serverSocket())
}

func (s *SPIRE) serverSocket() string { return s.path("server.sock") }

// StartAgent starts the agent, also again after StopAgent.
func (s *SPIRE) StartAgent(tb testing.TB) {
	tb.Helper()
	s.current = programtest.Start(tb, s.path("agent.log"), s.agentProgram, "run", "-config", s.path("agent.conf"))
	// Well is not enough: it must have learnt of the delegate.
	s.await(tb, s.current, s.agentProgram, "api", "fetch", "x509", "-socketPath", s.path("workload/api.sock"))
}

// StopAgent kills the agent.
func (s *SPIRE) StopAgent(tb testing.TB) {
	tb.Helper()
	s.current.Kill(tb)
}

// await returns once a command about a program succeeds.
func (s *SPIRE) await(tb testing.TB, p *programtest.Program, name string, args ...string) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
		if err == nil {
			return
		}
		select {
		case <-p.Ended():
			tb.Fatalf("%s ended: %v", name, p.Err())
		case <-ctx.Done():
			tb.Fatalf("%s does not come up: %s", name, out)
		case <-tick.C:
		}
	}
}

// Server runs a command of the spire-server program and returns its output.
func (s *SPIRE) Server(tb testing.TB, args ...string) []byte {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.serverProgram, append(args, "-socketPath", s.serverSocket())...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		tb.Fatalf("spire-server %v: %v: %s%s", args, err, out, stderr.String())
	}
	return out
}

// Register makes an entry and returns its entry ID. The agent learns of it within a
// second or two.
func (s *SPIRE) Register(tb testing.TB, e Entry) string {
	tb.Helper()
	args := []string{"entry", "create", "-output", "json", "-parentID", s.node(), "-spiffeID", e.ID}
	for _, sel := range e.Selectors {
		args = append(args, "-selector", sel)
	}
	if e.Lifetime != 0 {
		args = append(args, "-x509SVIDTTL", strconv.Itoa(int(e.Lifetime/time.Second)))
	}
	out := s.Server(tb, args...)
	var made struct {
		Results []struct {
			Entry struct {
				ID string `json:"id"`
			} `json:"entry"`
		} `json:"results"`
	}
	if err := json.Unmarshal(out, &made); err != nil || len(made.Results) != 1 || made.Results[0].Entry.ID == "" {
		tb.Fatalf("entry of %s is not made (%v): %s", e.ID, err, out)
	}
	return made.Results[0].Entry.ID
}

// Unregister removes an entry.
func (s *SPIRE) Unregister(tb testing.TB, entryID string) {
	tb.Helper()
	s.Server(tb, "entry", "delete", "-entryID", entryID)
}

// PrepareRoot has the server make its next root, which is trusted from then on.
func (s *SPIRE) PrepareRoot(tb testing.TB) {
	tb.Helper()
	s.Server(tb, "localauthority", "x509", "prepare")
}

// AgentLog is what the agent has logged so far, with debug messages.
func (s *SPIRE) AgentLog(tb testing.TB) string {
	tb.Helper()
	log, err := os.ReadFile(s.path("agent.log"))
	if err != nil {
		tb.Fatal(err)
	}
	return string(log)
}
