package table_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
)

// I9: no number of chunks makes a revision larger than the totals of dns.proto.
func TestMergeTotals(t *testing.T) {
	for _, tc := range []struct {
		name  string
		chunk func(i int) *dnsv1.SyncRequest
		want  string
	}{
		{name: "names", want: "set_names of one revision: 266240", chunk: func(i int) *dnsv1.SyncRequest {
			m := &dnsv1.SyncRequest{}
			for j := range dnsv1.MaxChunkNames {
				m.SetNames = append(m.SetNames, &dnsv1.Name{Name: "s" + strconv.Itoa(i*dnsv1.MaxChunkNames+j) + ".a.b", Vip4: "198.18.0.1"})
			}
			return m
		}},
		{name: "removed names", want: "remove_names of one revision: 266240", chunk: func(i int) *dnsv1.SyncRequest {
			m := &dnsv1.SyncRequest{}
			for j := range dnsv1.MaxChunkNames {
				m.RemoveNames = append(m.RemoveNames, "s"+strconv.Itoa(i*dnsv1.MaxChunkNames+j)+".a.b")
			}
			return m
		}},
		{name: "pods", want: "set_pods of one revision: 4608", chunk: func(i int) *dnsv1.SyncRequest {
			m := &dnsv1.SyncRequest{}
			for j := range dnsv1.MaxChunkPods {
				m.SetPods = append(m.SetPods, pod(i*dnsv1.MaxChunkPods+j).Message())
			}
			return m
		}},
		{name: "removed pods", want: "remove_pods of one revision: 4608", chunk: func(i int) *dnsv1.SyncRequest {
			m := &dnsv1.SyncRequest{}
			for j := range dnsv1.MaxChunkPods {
				m.RemovePods = append(m.RemovePods, &cniv1.Attachment{ContainerId: fmt.Sprint(i*dnsv1.MaxChunkPods + j), Ifname: "eth0"})
			}
			return m
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var c table.Change
			var err error
			for i := 0; err == nil; i++ {
				if i > 100 {
					t.Fatal("no end")
				}
				err = c.Merge(tc.chunk(i))
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}
