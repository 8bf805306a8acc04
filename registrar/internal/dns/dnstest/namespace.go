package dnstest

import (
	"testing"

	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// Namespace is a network namespace with DNS clients inside.
type Namespace struct {
	*netnstest.Namespace
}

// NewNamespace makes a namespace with lo up that lives until the test ends.
func NewNamespace(tb testing.TB) *Namespace {
	tb.Helper()
	return &Namespace{netnstest.New(tb)}
}
