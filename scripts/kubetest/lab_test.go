package kubetest

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/portolan-mesh/portolan/scripts/lab"
)

// nodes is how many the lab has; their names are node1 and node2.
const nodes = 2

func TestMain(m *testing.M) {
	if lab.Inside() {
		os.Exit(m.Run())
	}
	if err := host(); err != nil {
		fmt.Fprintln(os.Stderr, "kubetest:", err)
		os.Exit(1)
	}
}

// openLab says where the lab is; it need not be up.
func openLab() (lab.Lab, error) { return lab.Open("../..", "/tmp/portolan-e2e", nodes, os.Stdout) }

// host runs the tests in a lab with the mesh.
func host() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer stop()
	l, err := openLab()
	if err != nil {
		return err
	}
	begin := time.Now()
	return l.Host(ctx, os.Getenv("KEEP") != "", func(ctx context.Context) error {
		if err := l.Install(ctx); err != nil {
			dump(ctx, l, "install")
			return err
		}
		fmt.Fprintf(os.Stdout, "the mesh is up on %d nodes after %v\n", nodes, time.Since(begin).Round(time.Second))
		return nil
	})
}

// dump leaves what is known about the mesh in a folder.
func dump(ctx context.Context, l lab.Lab, name string) { l.Dump(ctx, "kubetest", name) }
