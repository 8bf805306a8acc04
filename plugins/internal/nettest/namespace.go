package nettest

import (
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// Namespace is a network namespace with servers and clients inside.
type Namespace struct {
	*netnstest.Namespace
}

// New makes a namespace with lo up that lives until the test ends.
func New(tb testing.TB) *Namespace {
	tb.Helper()
	return &Namespace{netnstest.New(tb)}
}

// At returns the namespace that a path leads to, which somebody else made.
func At(path string) *Namespace {
	return &Namespace{&netnstest.Namespace{Path: path}}
}

// HasTable reports whether the namespace has the nftables table "family name".
func (n *Namespace) HasTable(tb testing.TB, table string) bool {
	tb.Helper()
	return strings.Contains("\n"+n.Exec(tb, "nft", "list", "tables"), "\ntable "+table+"\n")
}
