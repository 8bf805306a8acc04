package listen_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain refuses to run without root: these tests make network namespaces, and a
// skipped one would prove nothing.
func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of listen make network namespaces: run them as root")
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}
