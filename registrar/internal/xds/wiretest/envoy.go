package wiretest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// startTimeout bounds how long a test waits for Envoy to do something.
const startTimeout = 30 * time.Second

// Envoy is a running Envoy process.
type Envoy struct {
	// PID is the process.
	PID   int
	admin *http.Client
	log   *limitedBuffer
	tb    testing.TB
}

// EnvoyConfig says how to start Envoy.
type EnvoyConfig struct {
	// Bootstrap is the configuration.
	Bootstrap []byte
	// AdminSocket is the admin interface of that configuration.
	AdminSocket string
	// Args are further arguments.
	Args []string
}

// Binary returns the path of the Envoy under test: $ENVOY, else bin/envoy of the
// repository.
func Binary(tb testing.TB) string {
	tb.Helper()
	if path := os.Getenv("ENVOY"); path != "" {
		return path
	}
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
			continue
		}
		path := filepath.Join(dir, "bin", "envoy")
		if _, err := os.Stat(path); err != nil {
			tb.Fatalf("no Envoy binary: %v; put one at bin/envoy or set ENVOY", err)
		}
		return path
	}
	tb.Fatal("not inside the repository, and ENVOY is not set")
	return ""
}

// StartEnvoy starts Envoy in the node's namespace and returns when its admin
// interface answers. It ends with the test; a test that failed shows its log.
func (l *Lab) StartEnvoy(c EnvoyConfig) *Envoy {
	tb := l.tb
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "bootstrap.json")
	if err := os.WriteFile(path, c.Bootstrap, 0o600); err != nil {
		tb.Fatal(err)
	}
	args := append([]string{
		"-c", path, "--log-level", "warning", "--concurrency", "2", "--disable-hot-restart",
		"--drain-time-s", "10", "--drain-strategy", "immediate",
	}, c.Args...)
	e := &Envoy{log: new(limitedBuffer), tb: tb, admin: unixClient(c.AdminSocket)}
	cmd := exec.CommandContext(context.Background(), Binary(tb), args...) //nolint:gosec // the binary under test
	cmd.Stdout, cmd.Stderr = e.log, e.log
	exited, err := l.Node.Spawn(cmd)
	if err != nil {
		tb.Fatalf("start Envoy: %v", err)
	}
	e.PID = cmd.Process.Pid
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		if err := <-exited; err == nil || !strings.Contains(err.Error(), "killed") {
			tb.Errorf("Envoy ended by itself: %v", err)
		}
		if tb.Failed() {
			tb.Logf("Envoy's log:\n%s", e.log)
		}
	})
	e.Eventually("Envoy's admin interface answers", func() bool {
		_, err := e.get("/ready")
		return err == nil
	})
	return e
}

// Eventually polls until the condition holds and fails the test if it does not in
// time.
func (e *Envoy) Eventually(what string, condition func() bool) {
	e.tb.Helper()
	Eventually(e.tb, what, condition)
}

// Eventually polls until the condition holds, every few milliseconds, and fails
// the test after half a minute. For what no event tells: another process's state.
func Eventually(tb testing.TB, what string, condition func() bool) {
	tb.Helper()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.Now().Add(startTimeout)
	for !condition() {
		if time.Now().After(deadline) {
			tb.Fatalf("not within %v: %s", startTimeout, what)
		}
		<-ticker.C
	}
}

// Stat returns one counter or gauge, 0 when Envoy does not have it.
func (e *Envoy) Stat(name string) int64 {
	e.tb.Helper()
	return e.Stats("^" + regexp.QuoteMeta(name) + "$")[name]
}

// Stats returns the counters and gauges whose names match the expression.
func (e *Envoy) Stats(filter string) map[string]int64 {
	e.tb.Helper()
	body := e.Get("/stats?format=json&type=All&filter=" + queryEscape(filter))
	var parsed struct {
		Stats []struct {
			Name  string
			Value json.RawMessage
		}
	}
	if err := json.Unmarshal([]byte(body), &parsed); err != nil {
		e.tb.Fatalf("stats %s: %v", filter, err)
	}
	out := make(map[string]int64)
	for _, s := range parsed.Stats {
		// Text readouts and histograms have no number here.
		if n, err := strconv.ParseInt(string(s.Value), 10, 64); err == nil {
			out[s.Name] = n
		}
	}
	return out
}

// Get returns the answer of an admin path.
func (e *Envoy) Get(path string) string {
	e.tb.Helper()
	body, err := e.get(path)
	if err != nil {
		e.tb.Fatalf("admin %s: %v", path, err)
	}
	return body
}

func (e *Envoy) get(path string) (string, error) {
	request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://admin"+path, nil)
	if err != nil {
		return "", err
	}
	response, err := e.admin.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode >= 500 && path != "/ready" {
		err = fmt.Errorf("%s: %s", response.Status, body)
	}
	return string(body), err
}

// Log returns what Envoy has printed.
func (e *Envoy) Log() string { return e.log.String() }

// RSS returns the process's resident memory in bytes.
func (e *Envoy) RSS() int64 {
	e.tb.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", e.PID))
	if err != nil {
		e.tb.Fatal(err)
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(data), &size, &resident); err != nil {
		e.tb.Fatal(err)
	}
	return resident * int64(os.Getpagesize())
}

// CPU returns the processor time that the process has used, in steps of 10 ms.
func (e *Envoy) CPU() time.Duration {
	e.tb.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", e.PID))
	if err != nil {
		e.tb.Fatal(err)
	}
	// After the program's name, in brackets, user and system time are the 12th and
	// 13th field.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	var user, system int64
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
		e.tb.Fatal(err)
	}
	return time.Duration(user+system) * 10 * time.Millisecond
}

// ValidateConfig runs `envoy --mode validate` on a configuration.
func ValidateConfig(tb testing.TB, config []byte) (string, error) {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "envoy.json")
	if err := os.WriteFile(path, config, 0o600); err != nil {
		tb.Fatal(err)
	}
	cmd := exec.CommandContext(tb.Context(), Binary(tb), "--mode", "validate", "--log-level", "warning", "-c", path) //nolint:gosec // the binary under test
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func unixClient(socket string) *http.Client {
	return &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
	}}
}

func queryEscape(s string) string {
	return strings.NewReplacer("%", "%25", "+", "%2B", "|", "%7C", "^", "%5E", `\`, "%5C", " ", "%20", "&", "%26", "#", "%23", "[", "%5B", "]", "%5D").Replace(s)
}
