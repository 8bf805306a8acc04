package node

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// The oldest Envoy that works: before it a missing network namespace crashes
// Envoy (dataplane decision 1).
const (
	envoyMajor = 1
	envoyMinor = 40
)

// checkEnvoy refuses an Envoy that is too old, or a file that is no Envoy.
func checkEnvoy(ctx context.Context, path string) error {
	out, err := output(ctx, path, "--version")
	if err != nil {
		return fmt.Errorf("ask %s for its version: %w", path, err)
	}
	version := regexp.MustCompile(`version: [0-9a-f]+/(\d+)\.(\d+)\.`).FindStringSubmatch(out)
	if version == nil {
		first, _, _ := strings.Cut(out, "\n")
		return fmt.Errorf("%s is no Envoy: --version printed %q", path, first)
	}
	major, _ := strconv.Atoi(version[1]) // digits, by the expression
	minor, _ := strconv.Atoi(version[2])
	if major < envoyMajor || major == envoyMajor && minor < envoyMinor {
		return fmt.Errorf("%s is Envoy %d.%d: use %d.%d or later", path, major, minor, envoyMajor, envoyMinor)
	}
	return nil
}
