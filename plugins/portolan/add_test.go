package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/cni/v1/cnitest"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/internal/nettest"
)

// Contract 4.1: ADD of a pod of the mesh tells the registrar everything, pins the
// namespace, captures its traffic and gives the result back; DEL takes all of it
// away again.
func TestAddDel(t *testing.T) {
	n := newNode(t, meshed())
	pod, rt := n.mustAdd("c1", joins)
	pinPath := filepath.Join(n.netnsDir, "c1-eth0")
	want := &cniv1.AddRequest{
		Attachment: &cniv1.Attachment{ContainerId: "c1", Ifname: "eth0"}, Network: "net", Netns: pinPath, RuntimeNetns: pod.Path,
		Addresses: []string{"10.0.0.2"}, DnsServers: []string{"10.96.0.10"}, Annotations: joins, AnnotationsKnown: true,
		CniArgs: map[string]string{"K8S_POD_NAMESPACE": "shop", "K8S_POD_NAME": "web-0", "K8S_POD_UID": "uid-0"},
	}
	if d := cmp.Diff([]*cniv1.AddRequest{want}, cnitest.RequestsOf[*cniv1.AddRequest](n.registrar), protocmp.Transform()); d != "" {
		t.Errorf("requests (-want +got):\n%s", d)
	}
	n.wantFiles(n.netnsDir, "c1-eth0", "c1-eth0.attached.json")
	n.wantFiles(n.spoolDir)
	n.wantPinned("c1", pod)
	if info, err := os.Stat(n.netnsDir); err != nil || info.Mode().Perm() != 0o711 {
		t.Errorf("folder of pins: %v, %v, want mode 0711: Envoy's uid passes through", info, err)
	}
	if d := cmp.Diff(want, n.note(n.netnsDir, "c1-eth0.attached.json").GetAttached(), protocmp.Transform()); d != "" {
		t.Errorf("note (-want +got):\n%s", d)
	}
	cfg, err := capture.FromProto(decision().GetCapture())
	if err != nil {
		t.Fatal(err)
	}
	if err := capture.Verify(pinPath, cfg); err != nil {
		t.Error(err)
	}
	// C11: ADD again without DEL in between.
	if _, err := n.add(rt); err != nil {
		t.Errorf("ADD again: %v", err)
	}
	n.wantPinned("c1", pod)
	if err := n.del(rt); err != nil {
		t.Fatal(err)
	}
	n.wantNothing(pod)
	if got := cnitest.RequestsOf[*cniv1.DelRequest](n.registrar); len(got) != 1 || got[0].GetNetwork() != "net" || got[0].GetAttachment().GetContainerId() != "c1" {
		t.Errorf("DEL told the registrar %v", got)
	}
}

// CNI-42, CNI-43: the result of the plugins before us comes out of the chain as
// it went in, at the configuration's version; versions that we do not know are
// code 1.
func TestVersionMatrix(t *testing.T) {
	for _, v := range []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		for name, annotations := range map[string]map[string]string{"meshed": joins, "passed through": out} {
			t.Run(v+" "+name, func(t *testing.T) {
				golden, err := os.ReadFile("internal/netconf/testdata/prev-" + v + ".json")
				if err != nil {
					t.Fatal(err)
				}
				n := newNode(t, meshed())
				n.version, n.result = v, string(golden)
				// Alone: down to the fields that nobody knows.
				pod := nettest.New(t)
				stdout, code := n.run(env("ADD", "c0", pod.Path), n.addStdin(annotations))
				if d := cmp.Diff(asJSON(t, n.result), asJSON(t, stdout)); code != 0 || d != "" {
					t.Errorf("exit code %d, result (-want +got):\n%s", code, d)
				}
				// In the chain: what the library keeps.
				result, err := n.add(sandboxOf("c1", pod.Path, annotations))
				if err != nil {
					t.Fatal(err)
				}
				if result.Version() != v {
					t.Errorf("the chain's result has version %s", result.Version())
				}
				got, err := json.Marshal(result)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(known(t, n.result), known(t, string(got))); d != "" {
					t.Errorf("result of the chain (-want +got):\n%s", d)
				}
			})
		}
	}
	n := newNode(t, meshed())
	for _, v := range []string{"9.9.9", "0.2.0", "0.1.0", ""} {
		n.version = v
		stdout, code := n.run(env("ADD", "c1", "/x"), n.addStdin(joins))
		if code != 1 {
			t.Errorf("version %q: exit code %d", v, code)
		}
		wantDocument(t, stdout, types.ErrIncompatibleCNIVersion, "incompatible CNI versions")
	}
	info, err := n.runtime().GetVersionInfo(t.Context(), "portolan")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}, info.SupportedVersions()); d != "" {
		t.Errorf("VERSION (-want +got):\n%s", d)
	}
	if ok, _ := version.GreaterThanOrEqualTo(info.SupportedVersions()[4], version.Current()); !ok {
		t.Errorf("the library speaks %s, we do not", version.Current())
	}
}

func asJSON(t *testing.T, text string) any {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return v
}

// known strips the invented fields of the golden results, which libcni drops
// between two plugins.
func known(t *testing.T, text string) any {
	t.Helper()
	v, ok := asJSON(t, text).(map[string]any)
	if !ok {
		t.Fatalf("%s is no object", text)
	}
	delete(v, "example.com/extra")
	for _, list := range []string{"ips", "interfaces"} {
		for _, e := range v[list].([]any) {
			delete(e.(map[string]any), "note")
			delete(e.(map[string]any), "vendor")
		}
	}
	return v
}

// Contract 5, CNI-4, CNI-19, CNI-D10, MESH-40: with the registrar away a pod that
// asks for the mesh fails in time with code 11 and the remedy; any other starts
// unmeshed and leaves a note; nobody is asked about bypassed pods. Whatever the
// way, nothing is half done.
func TestFailPolicy(t *testing.T) {
	away := map[string]struct {
		prepare func(n *node)
		text    string
	}{
		"no socket": {func(*node) {}, "registrar is away: nothing listens at "},
		"hung":      {func(n *node) { n.hang() }, "did not answer in time"},
		"not ready": {func(n *node) {
			n.registrar = cnitest.StartAt(n.t, n.socket, fails(status.Error(codes.Unavailable, "Envoy is not connected: wait for DaemonSet portolan-dataplane")))
		}, "Envoy is not connected: wait for DaemonSet portolan-dataplane"},
		"broken": {func(n *node) {
			n.registrar = cnitest.StartAt(n.t, n.socket, fails(status.Error(codes.Internal, "disk full")))
		}, " failed: check the log"},
	}
	for name, a := range away {
		for pod, annotations := range map[string]map[string]string{
			"asks": joins, "says nothing": plain, "annotations unknown": nil, "stays out": out, "bypassed": joins,
		} {
			t.Run(name+", "+pod, func(t *testing.T) {
				t.Parallel()
				n := newNodeWithout(t)
				n.conf["timeoutSeconds"] = 1
				a.prepare(n)
				netns := nettest.New(t)
				rt := sandboxOf("c1", netns.Path, annotations)
				if pod == "bypassed" {
					rt.Args[1][1] = "portolan-system"
				}
				start := time.Now()
				_, err := n.add(rt)
				if took := time.Since(start); took > budget {
					t.Errorf("took %v", took)
				}
				n.wantFiles(n.netnsDir)
				if netns.HasTable(t, "inet portolan") {
					t.Error("captured")
				}
				switch pod {
				case "asks":
					wantCode(t, err, types.ErrTryAgainLater, a.text)
				case "says nothing", "annotations unknown":
					if err != nil {
						t.Fatalf("does not start: %v", err)
					}
					note := n.note(n.spoolDir, "c1-eth0.unmeshed.json").GetUnmeshed()
					if note.GetNetns() != netns.Path || note.GetAnnotationsKnown() != (annotations != nil) || note.GetCniArgs()["K8S_POD_NAME"] != "web-0" {
						t.Errorf("note = %v", note)
					}
				default:
					if err != nil {
						t.Fatalf("does not start: %v", err)
					}
					n.wantFiles(n.spoolDir)
					if n.registrar != nil && len(n.registrar.Requests()) != 0 {
						t.Errorf("the registrar was asked: %v", n.registrar.Requests())
					}
				}
			})
		}
	}
}

// CNI-45: what the registrar is told of annotations when the runtime passes some,
// none, or does not pass them at all.
func TestAnnotationsKnown(t *testing.T) {
	for name, tc := range map[string]struct {
		runtimeConfig any
		known         bool
		asked         bool
	}{
		"no runtimeConfig":    {nil, false, true},
		"empty runtimeConfig": {map[string]any{}, false, true},
		"null":                {map[string]any{"io.kubernetes.cri.pod-annotations": nil}, false, true},
		"no annotation":       {map[string]any{"io.kubernetes.cri.pod-annotations": map[string]string{}}, true, true},
		"stays out":           {map[string]any{"io.kubernetes.cri.pod-annotations": out}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, cnitest.Behaviour{})
			netns := nettest.New(t)
			stdout, code := n.run(env("ADD", "c1", netns.Path), n.stdin(map[string]any{
				"prevResult": json.RawMessage(n.result), "runtimeConfig": tc.runtimeConfig,
			}))
			if d := cmp.Diff(asJSON(t, n.result), asJSON(t, stdout)); code != 0 || d != "" {
				t.Errorf("exit code %d, result (-want +got):\n%s", code, d)
			}
			got := cnitest.RequestsOf[*cniv1.AddRequest](n.registrar)
			if (len(got) == 1) != tc.asked || tc.asked && got[0].GetAnnotationsKnown() != tc.known {
				t.Errorf("the registrar was told %v", got)
			}
			n.wantNothing(netns) // MESH-39: not in the mesh is not captured
		})
	}
}

// CNI-62: ADD returns when the registrar has proven the listeners, not before.
func TestAddWaitsForProof(t *testing.T) {
	const proof = 200 * time.Millisecond
	n := newNode(t, cnitest.Behaviour{Add: func(ctx context.Context, _ *cniv1.AddRequest, send func(*cniv1.AddResponse) error) error {
		if err := send(decision()); err != nil {
			return err
		}
		timer := time.NewTimer(proof)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}})
	start := time.Now()
	n.mustAdd("c1", joins)
	if took := time.Since(start); took < proof {
		t.Errorf("ADD returned after %v, before the proof", took)
	}
}

// DNS is redirected when ADD returns, and not only once the mesh DNS looks: an
// application's first query is the mesh's (MESH-46).
func TestAddRedirectsDNS(t *testing.T) {
	n := newNode(t, meshed())
	pod, _ := n.mustAdd("c1", joins)
	if got := pod.Exec(t, "nft", "list", "set", "inet", "portolan", "alive"); !strings.Contains(got, "elements = { 53 ") {
		t.Errorf("DNS is not redirected:\n%s", got)
	}
}

// slowProof is a plugin's clock by which the proof takes as long as it says.
type slowProof struct {
	netnsCapture
	now       time.Time
	took      time.Duration
	redirects int
}

func (s *slowProof) Start(string, capture.Config) error {
	s.now = s.now.Add(s.took)
	return nil
}

func (s *slowProof) RedirectDNS(string) error {
	s.redirects++
	return nil
}

// After a proof that took long, what ADD began with may end before the mesh DNS looks,
// so ADD redirects DNS again.
func TestAddRedirectsDNSAgain(t *testing.T) {
	for took, want := range map[time.Duration]int{time.Second: 0, 3 * time.Second: 1} {
		n := newNode(t, meshed())
		pod := nettest.New(t)
		slow := &slowProof{now: time.Now(), took: took}
		p := &plugin{log: slog.New(slog.DiscardHandler), capture: slow, now: func() time.Time { return slow.now }}
		if err := p.add(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Netns: pod.Path, StdinData: []byte(n.addStdin(joins))}); err != nil {
			t.Fatal(err)
		}
		if slow.redirects != want {
			t.Errorf("after %v: redirected %d times more, want %d", took, slow.redirects, want)
		}
	}
}

// CNI-48, CNI-62, CNI-D4: whatever goes wrong after the decision, ADD fails with
// its code and undoes everything: capture, registration, pin and note.
func TestAddUndoes(t *testing.T) {
	after := func(err error) cnitest.Behaviour {
		return cnitest.Behaviour{Add: func(ctx context.Context, _ *cniv1.AddRequest, send func(*cniv1.AddResponse) error) error {
			if e := send(decision()); e != nil {
				return e
			}
			if err == nil {
				<-ctx.Done()
				return ctx.Err()
			}
			return err
		}}
	}
	badCapture := cnitest.Behaviour{Add: func(_ context.Context, _ *cniv1.AddRequest, send func(*cniv1.AddResponse) error) error {
		return send(&cniv1.AddResponse{Meshed: true, Capture: &cniv1.Capture{}})
	}}
	for _, tc := range []struct {
		name        string
		behaviour   cnitest.Behaviour
		annotations map[string]string
		code        uint
		text        string
	}{
		{"not proven", after(status.Error(codes.Unavailable, "listener 15002 is not proven in c1")), joins, 11, "listener 15002 is not proven in c1"},
		{"not proven, opted in by its namespace", after(status.Error(codes.Unavailable, "secret is not acknowledged")), plain, 11, "secret is not acknowledged"},
		{"never proven", after(nil), joins, 11, "did not answer in time"},
		{"bad annotation", fails(status.Error(codes.InvalidArgument, "endpoint.aether.io/port=\"0\": not 1-65535; write a port\nand more")), joins, 102, `endpoint.aether.io/port="0": not 1-65535; write a port`},
		{"bad annotation, opted in by its namespace", fails(status.Error(codes.InvalidArgument, "x=y: bad")), plain, 102, "x=y: bad"},
		{"refused", fails(status.Error(codes.FailedPrecondition, "owned by another")), nil, 103, "owned by another"},
		{"kernel", fails(status.Error(codes.Unimplemented, "kernel lacks nft redirect")), joins, 104, "kernel lacks nft redirect"},
		{"unusable capture", badCapture, joins, 11, " failed: check the log"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, tc.behaviour)
			n.conf["timeoutSeconds"] = 1
			netns := nettest.New(t)
			_, err := n.add(sandboxOf("c1", netns.Path, tc.annotations))
			wantCode(t, err, tc.code, tc.text)
			n.wantNothing(netns)
			if got := cnitest.RequestsOf[*cniv1.DelRequest](n.registrar); len(got) != 1 {
				t.Errorf("the registrar was told to forget %d times, want once", len(got))
			}
		})
	}
}

// CNI-25, CNI-D4: after our ADD failed, libcni rolls nothing back; the DEL that
// follows reaches the plugin before us exactly once, without a cached result.
func TestAddFailsDelReachesPrimary(t *testing.T) {
	n := newNodeWithout(t)
	n.conf["timeoutSeconds"] = 1
	netns := nettest.New(t)
	rt := sandboxOf("c1", netns.Path, joins)
	_, err := n.add(rt)
	wantCode(t, err, types.ErrTryAgainLater, n.socket)
	if err := n.del(rt); err != nil {
		t.Fatalf("DEL: %v", err)
	}
	if got := n.primaryLog(); got != "ADD c1\nDEL c1\n" {
		t.Errorf("the plugin before us was asked:\n%s", got)
	}
	n.wantFiles(n.spoolDir, "c1-eth0.deleted.json")
}

// An ADD that succeeds after a failed one with the same ID removes the notes of
// the failed one: replayed, they would delete the running pod.
func TestAddRemovesOldNotes(t *testing.T) {
	n := newNodeWithout(t)
	n.conf["timeoutSeconds"] = 1
	netns := nettest.New(t)
	rt := sandboxOf("c1", netns.Path, plain)
	if _, err := n.add(rt); err != nil {
		t.Fatal(err)
	}
	if err := n.del(rt); err != nil {
		t.Fatal(err)
	}
	if _, err := n.add(rt); err != nil {
		t.Fatal(err)
	}
	n.wantFiles(n.spoolDir, "c1-eth0.unmeshed.json")
	n.registrar = cnitest.StartAt(t, n.socket, meshed())
	if _, err := n.add(rt); err != nil {
		t.Fatal(err)
	}
	n.wantFiles(n.spoolDir)
	n.wantPinned("c1", netns)
}

// Two attachments whose names make one file name are told apart: the second is
// refused with code 103, and its DEL leaves the first alone.
func TestAddConflict(t *testing.T) {
	n := newNode(t, meshed())
	first, second := nettest.New(t), nettest.New(t)
	a, b := sandboxOf("a", first.Path, joins), sandboxOf("a-b", second.Path, joins)
	a.IfName, b.IfName = "b-c", "c"
	if _, err := n.add(a); err != nil {
		t.Fatal(err)
	}
	_, err := n.add(b)
	wantCode(t, err, 103, "belongs to another container and interface")
	if err := n.del(b); err != nil {
		t.Fatal(err)
	}
	n.wantFiles(n.netnsDir, "a-b-c", "a-b-c.attached.json")
	if !first.HasTable(t, "inet portolan") || second.HasTable(t, "inet portolan") {
		t.Error("the first pod's capture is gone, or the second has one")
	}
}

// CNI-39, CNI-D6, XDS-14: the plugin's own namespace, so any pod that shares the node's
// addresses, is refused with one document before anything is done, whoever is asked
// about; CNI-41 and bad input likewise.
func TestAddRefuses(t *testing.T) {
	n := newNode(t, meshed())
	netns := nettest.New(t)
	regular := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(regular, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	with := func(more map[string]any) string {
		all := map[string]any{"prevResult": json.RawMessage(n.result)}
		maps.Copy(all, more)
		return n.stdin(all)
	}
	for _, tc := range []struct {
		name, netns, stdin string
		env                map[string]string
		code               uint
		text               string
	}{
		{"own namespace", "/proc/self/ns/net", n.addStdin(joins), nil, 8, "is the plugin's own network namespace"},
		{"own namespace, passed through", "/proc/thread-self/ns/net", n.addStdin(out), nil, 8, "is the plugin's own network namespace"},
		{"own namespace, bypassed", "/proc/self/ns/net", n.addStdin(joins), map[string]string{"CNI_ARGS": "K8S_POD_NAMESPACE=kube-system"}, 8, "own network namespace"},
		{"no namespace", "/run/netns/gone", n.addStdin(joins), nil, 4, "CNI_NETNS=/run/netns/gone is no network namespace"},
		{"regular file", regular, n.addStdin(joins), nil, 4, "is no network namespace"},
		{"mount namespace", "/proc/self/ns/mnt", n.addStdin(joins), nil, 4, "is no network namespace"},
		{"no prevResult", netns.Path, n.stdin(nil), nil, 7, "no prevResult"},
		{"no address", netns.Path, with(map[string]any{"prevResult": map[string]any{"cniVersion": "1.1.0"}}), nil, 7, "prevResult has no address"},
		{"own field", netns.Path, with(map[string]any{"timeoutSeconds": "5"}), nil, 7, `conflist key timeoutSeconds="5" is not valid`},
		{"arguments", netns.Path, n.addStdin(joins), map[string]string{"CNI_ARGS": "junk"}, 4, `CNI_ARGS: "junk"`},
		{"no JSON", netns.Path, "nonsense", nil, 6, ""},
		{"no name", netns.Path, `{"cniVersion":"1.1.0"}`, nil, 7, "missing network name"},
		{"no container", netns.Path, n.addStdin(joins), map[string]string{"CNI_CONTAINERID": "", "CNI_IFNAME": ""}, 4, "required env variables [CNI_CONTAINERID,CNI_IFNAME] missing"},
		{"bad container", netns.Path, n.addStdin(joins), map[string]string{"CNI_CONTAINERID": "../x"}, 4, "invalid characters in containerID"},
		{"bad interface", netns.Path, n.addStdin(joins), map[string]string{"CNI_IFNAME": "a/b"}, 4, "interface name contains"},
		{"interface like a note", netns.Path, n.addStdin(joins), map[string]string{"CNI_IFNAME": "a.attached.json"}, 4, "ends like a note"},
		{"unknown command", netns.Path, n.addStdin(joins), map[string]string{"CNI_COMMAND": "FOO"}, 4, "unknown CNI_COMMAND: FOO"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := env("ADD", "c1", tc.netns)
			maps.Copy(e, tc.env)
			stdout, code := n.run(e, tc.stdin)
			if code != 1 {
				t.Errorf("exit code %d", code)
			}
			wantDocument(t, stdout, tc.code, tc.text)
		})
	}
	n.wantNothing(netns)
	if got := n.registrar.Requests(); len(got) != 0 {
		t.Errorf("the registrar was asked: %v", got)
	}
	host := nettest.At("/proc/self/ns/net")
	if host.HasTable(t, "inet portolan") {
		t.Error("the node is captured")
	}
	// C13: unless the runtime says that it means it.
	e := env("ADD", "c1", "/proc/self/ns/net")
	e["CNI_NETNS_OVERRIDE"] = "1"
	if stdout, code := n.run(e, n.addStdin(out)); code != 0 || !strings.Contains(stdout, "10.0.0.2/24") {
		t.Errorf("with CNI_NETNS_OVERRIDE: exit code %d, %s", code, stdout)
	}
}
