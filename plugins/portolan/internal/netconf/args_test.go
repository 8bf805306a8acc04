package netconf

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// FuzzParseArgs takes what a runtime puts into the environment. Pairs are read as
// they are, bad ones are code 4 and cost no good one, and an attachment that passes
// the checks can be sent to the registrar and name a file (C3, C25).
func FuzzParseArgs(f *testing.F) {
	f.Add("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=payments-1;K8S_POD_UID=u", "c1", "eth0", "/run/netns/c1")
	f.Add("", "", "", "")
	f.Add("K8S_POD_NAMESPACE", "-c1", "eth0:1", "run/netns")
	f.Add(";;=;K8S_=;K8S_POD_NAME==;K8S_POD_NAME=a=b", "..", "..", "/")
	f.Add("K8S_POD_NAME=\xff;K8S_POD_NAMESPACE=\x00", "c/1", "\xff", "/\xff")
	f.Add("K8S_POD_NAME=\xff", "c1", "eth0", "/run/netns/\xa6")
	f.Add(strings.Repeat("K8S_A=b;", 40)+"K8S_"+strings.Repeat("k", 300)+"=v", strings.Repeat("c", 254), strings.Repeat("e", 16), "/"+strings.Repeat("n", 4096))
	f.Fuzz(func(t *testing.T, text, containerID, ifname, netns string) {
		args, err := ParseArgs(text)
		if e, ok := errors.AsType[*types.Error](err); err != nil && (!ok || e.Code != types.ErrInvalidEnvironmentVariables || len(e.Msg) > 400) {
			t.Fatalf("%v is no short CNI error 4", err)
		}
		var pairs []string
		for _, key := range slices.Sorted(maps.Keys(args)) {
			if !strings.HasPrefix(key, "K8S_") || !strings.Contains(text, key+"="+args[key]) {
				t.Fatalf("%q=%q is not in %q", key, args[key], text)
			}
			pairs = append(pairs, key+"="+args[key])
		}
		if again, err := ParseArgs(strings.Join(pairs, ";")); err != nil || !maps.Equal(args, again) {
			t.Fatalf("%v reads back as %v, %v", args, again, err)
		}
		if _, why := (Config{BypassNamespaces: []string{"kube-system"}}).Decide(args); why == "" {
			t.Fatal("no reason for the decision")
		}
		request := &cniv1.AddRequest{
			Attachment: &cniv1.Attachment{ContainerId: containerID, Ifname: ifname}, Network: "net",
			Netns: netns, RuntimeNetns: netns, CniArgs: args, Addresses: []string{"10.0.0.1"},
		}
		if request.Validate() != nil {
			return
		}
		if _, err := proto.Marshal(request); err != nil {
			t.Errorf("passed the checks and cannot be sent: %v", err)
		}
		if name, err := spool.Name(request.GetAttachment(), spool.Attached); err != nil || strings.ContainsAny(name, "/\x00") {
			t.Errorf("passed the checks and names no file: %q, %v", name, err)
		}
	})
}
