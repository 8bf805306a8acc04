// Command portolan is the chained CNI plugin that puts pods into the mesh. It
// tells the registrar of the node about a pod and programs the capture of its
// traffic; the result of the plugins before it passes through unchanged. See
// ../DESIGN.md for what it promises.
package main

import (
	"errors"
	"log/slog"
	"os"
	"time"

	"github.com/portolan-mesh/portolan/plugins/capture"
)

// logBudget is how long exiting may wait for log lines to be taken (CNI-72).
const logBudget = 100 * time.Millisecond

func main() { os.Exit(run()) }

// run is the program; it returns the exit code.
func run() int {
	stdout, err := guardStdout()
	logs := newSink(os.Stderr)
	defer logs.close(logBudget)
	log := slog.New(slog.NewTextHandler(logs, nil))
	if err != nil {
		log.Error("standard output cannot be guarded", "error", err)
		return 1
	}
	p := &plugin{log: log, capture: netnsCapture{}, now: time.Now}
	return p.main(os.Getenv("CNI_COMMAND"), stdout)
}

// netnsCapture is the capture of package capture, in real namespaces.
type netnsCapture struct{}

func (netnsCapture) Start(netns string, cfg capture.Config) error { return capture.Start(netns, cfg) }

func (netnsCapture) Verify(netns string, cfg capture.Config) error { return capture.Verify(netns, cfg) }
func (netnsCapture) Remove(netns string) error                     { return capture.Remove(netns) }

func (netnsCapture) RedirectDNS(netns string) error {
	alive, err := capture.OpenAlive(netns)
	if err != nil {
		return err
	}
	return errors.Join(alive.Refresh(), alive.Close())
}
