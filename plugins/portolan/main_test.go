package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// testRelease is the release that the tested plugin was built as.
const testRelease = "v0.0.0-test"

// binEnv tells the stages of the sandbox where the first one put what it built.
const binEnv = "PORTOLAN_TEST_BIN"

// bin holds what the tests run.
var bin struct {
	// dir is on CNI_PATH: portolan as released, primary, bridge, host-local.
	dir string
	// failpoints holds portolan with failpoints, and primary.
	failpoints string
}

// The binaries are built once, outside the sandbox, where go may still have to
// fetch modules; the tests run inside.
func TestMain(m *testing.M) {
	dir, inside := os.LookupEnv(binEnv)
	if !inside {
		var err error
		if dir, err = build(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	bin.dir, bin.failpoints = filepath.Join(dir, "released"), filepath.Join(dir, "failpoints")
	code := sandbox.Run(m.Run)
	if !inside {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// build makes the binaries in a folder that every user can reach: a test runs the
// plugin as another one.
func build() (string, error) {
	const reference = "github.com/containernetworking/plugins/plugins/"
	dir, err := os.MkdirTemp("", "portolan-bin")
	if err != nil {
		return "", err
	}
	released, failpoints := dir+"/released/", dir+"/failpoints/"
	for _, args := range [][]string{
		{"build", "-trimpath", "-tags=grpcnotrace", "-ldflags=-s -w -X main.release=" + testRelease, "-o", released, "."},
		{"build", "-tags=failpoints,grpcnotrace", "-ldflags=-s -w", "-o", failpoints, "."},
		{"build", "-o", released, "./testdata/primary"},
		{"build", "-o", failpoints, "./testdata/primary"},
		{"-C", "../../scripts/tools/cni", "build", "-o", released, reference + "main/bridge", reference + "ipam/host-local"},
	} {
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w: %s", cmd.Args, err, out)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return "", err
	}
	return dir, os.Setenv(binEnv, dir)
}
