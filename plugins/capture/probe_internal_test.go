package capture

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// fakeKernel takes nftables transactions and refuses with ENOENT, as a kernel
// without a module does, those whose bytes contain lacks.
type fakeKernel struct {
	lacks []byte
	table bool // our table is there
}

func (k *fakeKernel) dial() (*nftables.Conn, error) {
	return nftables.New(nftables.AsLasting(), nftables.WithTestDial(k.exchange))
}

func (k *fakeKernel) exchange(req []netlink.Message) ([]netlink.Message, error) {
	const subsystem = unix.NFNL_SUBSYS_NFTABLES << 8
	if len(req) == 1 && req[0].Header.Type == subsystem|unix.NFT_MSG_GETTABLE && k.table {
		name, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.NFTA_TABLE_NAME, Data: []byte(Table + "\x00")}})
		if err != nil {
			return nil, err
		}
		answer := req[0]
		answer.Header.Type = subsystem | unix.NFT_MSG_NEWTABLE
		answer.Header.Flags = 0
		answer.Data = append([]byte{unix.NFPROTO_INET, 0, 0, 0}, name...)
		return []netlink.Message{answer}, nil
	}
	for _, m := range req {
		if bytes.Contains(m.Data, k.lacks) {
			return nil, unix.ENOENT
		}
	}
	for _, m := range req {
		if m.Header.Type == subsystem|unix.NFT_MSG_NEWTABLE {
			k.table = true
		}
		if m.Header.Type == subsystem|unix.NFT_MSG_DELTABLE {
			k.table = false
		}
	}
	return nil, io.EOF // no more to read: every message is acknowledged
}

// CNI-51: the probe names what the kernel lacks, with the kernel's answer and a
// remedy, and leaves no table.
func TestProbeNamesFeature(t *testing.T) {
	for lacks, want := range map[string]string{
		"redir\x00":         "nft redirect",
		"notrack\x00":       "nft notrack",
		"nat\x00":           "nft chains of the type nat in the family inet",
		"raw_output\x00":    "nft chains of the priority raw",
		"meta\x00":          "nft meta expressions",
		"payload\x00":       "nft payload expressions",
		"tcp_ports6\x00":    "nft sets of (address . port)",
		"alive\x00":         "nft sets with a timeout",
		"portolan\x00":      "nft tables of the family inet",
		"by annotation\x00": "the nft rules of the capture",
	} {
		t.Run(want, func(t *testing.T) {
			k := &fakeKernel{lacks: []byte(lacks)}
			err := probe(k.dial)
			feature, ok := errors.AsType[*FeatureError](err)
			if !ok || feature.Feature != want || !errors.Is(err, unix.ENOENT) {
				t.Fatalf("probe = %v, want a *FeatureError about %q", err, want)
			}
			if !strings.HasPrefix(feature.Error(), "kernel lacks "+want+": ") {
				t.Errorf("message = %q", feature)
			}
			if k.table {
				t.Error("a table is left")
			}
		})
	}
	k := &fakeKernel{lacks: []byte("nothing like this")}
	if err := probe(k.dial); err != nil {
		t.Errorf("probe of a kernel that has everything: %v", err)
	}
}

// This kernel has everything, and the probe leaves no descriptor and no change
// in the caller's namespace.
func TestProbe(t *testing.T) {
	for range 3 {
		if err := Probe(); err != nil {
			t.Fatal(err)
		}
	}
	c, err := dial()
	if err != nil {
		t.Fatal(err)
	}
	tables, err := c.ListTables()
	if err := errors.Join(err, c.CloseLasting()); err != nil || len(tables) != 0 {
		t.Errorf("tables of the caller's namespace: %v, %v", tables, err)
	}
}

// The difference of two sorted lists is what is new and what is gone, so that an
// element that stays is never deleted (dataplane decision 8).
func TestDifference(t *testing.T) {
	list := func(text string) []string { return strings.Fields(text) }
	for _, tc := range []struct{ name, have, want, added, removed string }{
		{"equal", "1 2 3", "1 2 3", "", ""},
		{"empty", "", "", "", ""},
		{"all new", "", "1 2", "1 2", ""},
		{"all gone", "1 2", "", "", "1 2"},
		{"both ends and middle", "2 3 5", "1 3 4 6", "1 4 6", "2 5"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			added, removed := difference(addrPorts(t, list(tc.have)), addrPorts(t, list(tc.want)))
			if got := texts(added); got != tc.added {
				t.Errorf("added %q, want %q", got, tc.added)
			}
			if got := texts(removed); got != tc.removed {
				t.Errorf("removed %q, want %q", got, tc.removed)
			}
		})
	}
}
