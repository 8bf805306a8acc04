package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// bin holds what the tests run; TestMain builds it once.
var bin struct {
	// dir is on CNI_PATH: portolan as released, primary, bridge, host-local.
	dir string
	// failpoints holds portolan with failpoints, and primary.
	failpoints string
}

func TestMain(m *testing.M) {
	os.Exit(sandbox.Run(func() int {
		dir, err := os.MkdirTemp("", "portolan-bin")
		if err == nil {
			bin.dir, bin.failpoints = filepath.Join(dir, "released"), filepath.Join(dir, "failpoints")
			err = buildAll()
		}
		if err == nil {
			err = os.Chmod(dir, 0o755)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		code := m.Run()
		_ = os.RemoveAll(dir)
		return code
	}))
}

func buildAll() error {
	const reference = "github.com/containernetworking/plugins/plugins/"
	for _, args := range [][]string{
		{"build", "-trimpath", "-tags=grpcnotrace", "-ldflags=-s -w", "-o", bin.dir + "/", "."},
		{"build", "-tags=failpoints,grpcnotrace", "-ldflags=-s -w", "-o", bin.failpoints + "/", "."},
		{"build", "-o", bin.dir + "/", "./testdata/primary"},
		{"build", "-o", bin.failpoints + "/", "./testdata/primary"},
		{"-C", "../../scripts/tools/cni", "build", "-o", bin.dir + "/", reference + "main/bridge", reference + "ipam/host-local"},
	} {
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", cmd.Args, err, out)
		}
	}
	return nil
}
