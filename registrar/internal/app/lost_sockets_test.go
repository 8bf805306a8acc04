package app

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
)

// What is missing names every lost socket until it is there again.
func TestLostSockets(t *testing.T) {
	var l lostSockets
	log := slog.New(slog.DiscardHandler)
	xds, cni := l.socket(log, "/run/x/xds.sock"), l.socket(log, "/run/x/cni.sock")
	if got := l.missing(); got != "" {
		t.Errorf("nothing is lost: %s", got)
	}
	xds(errors.New("no such folder"))
	cni(errors.New("no such folder"))
	if got := l.missing(); !strings.Contains(got, "/run/x/cni.sock and /run/x/xds.sock") || !strings.Contains(got, "no such folder") {
		t.Errorf("both are lost: %s", got)
	}
	xds(nil)
	cni(nil)
	if got := l.missing(); got != "" {
		t.Errorf("both are there again: %s", got)
	}
}
