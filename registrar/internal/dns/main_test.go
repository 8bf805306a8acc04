package dns_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/registrar/internal/dns"
	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// processEnv makes the test binary the mesh-DNS process, in the folder it names.
const processEnv = "PORTOLAN_TEST_MESH_DNS"

// The tests run in a sandbox: real namespaces, nothing left behind. No goroutine
// is left behind either.
func TestMain(m *testing.M) {
	if dir := os.Getenv(processEnv); dir != "" {
		os.Exit(runProcess(dir))
	}
	os.Exit(sandbox.Run(func() int {
		code := m.Run()
		if err := goleak.Find(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		return code
	}))
}

// config is the process' configuration in a folder.
func config(dir string) dns.Config {
	return dns.Config{
		Socket: dir + "/run/dns.sock", StateFile: dir + "/lib/dns.json",
		Registry:  prometheus.NewRegistry(),
		OpenAlive: func(netns string) (dns.Alive, error) { return capture.OpenAlive(netns) },
		Log:       slog.New(slog.DiscardHandler),
	}
}

func runProcess(dir string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	cfg := config(dir)
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := dns.Run(ctx, cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
