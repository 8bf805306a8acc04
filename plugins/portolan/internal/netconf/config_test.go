package netconf

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func defaults() Config {
	return Config{
		CNIVersion: "1.1.0", Name: "net", Socket: "/run/portolan/cni/cni.sock", Timeout: 5 * time.Second,
		BypassNamespaces: []string{"kube-system", "portolan-system"},
		SpoolDir:         "/run/portolan/spool", NetnsDir: "/run/portolan/netns",
	}
}

// stdin is a configuration with more fields than the plugin's.
func stdin(more string) []byte {
	return []byte(`{"cniVersion":"1.1.0","name":"net","type":"portolan"` + more + `}`)
}

// Contract 7's defaults hold; own fields are read; fields of others and of the
// runtime are ignored (C5, C23).
func TestParse(t *testing.T) {
	for _, tc := range []struct {
		name, more string
		edit       func(*Config)
	}{
		{"defaults", ``, func(*Config) {}},
		{"foreign fields", `,"capabilities":{"io.kubernetes.cri.pod-annotations":true},"cni.dev/x":1,"foo":{"socket":"x"},"Socket":5`, func(*Config) {}},
		{"null fields", `,"socket":null,"timeoutSeconds":null,"bypassNamespaces":null,"spoolDir":null,"netnsDir":null,"runtimeConfig":null,"prevResult":null`, func(*Config) {}},
		{"all fields", `,"socket":"/s","timeoutSeconds":1,"bypassNamespaces":[],"spoolDir":"/a","netnsDir":"/b","reportStatus":true`, func(c *Config) {
			c.ReportStatus = true
			c.Socket, c.Timeout, c.BypassNamespaces, c.SpoolDir, c.NetnsDir = "/s", time.Second, []string{}, "/a", "/b"
		}},
		{"longest", `,"timeoutSeconds":60,"socket":"/` + strings.Repeat("s", 106) + `"`, func(c *Config) {
			c.Timeout, c.Socket = time.Minute, "/"+strings.Repeat("s", 106)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Parse(stdin(tc.more))
			if err != nil {
				t.Fatal(err)
			}
			want := defaults()
			tc.edit(&want)
			if d := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Config{})); d != "" {
				t.Errorf("Parse (-want +got):\n%s", d)
			}
		})
	}
}

// A bad own field is CNI code 7 with key, value and remedy, and its default is
// used where the command goes on (C16).
func TestParseRefuses(t *testing.T) {
	for _, tc := range []struct{ name, more, want string }{
		{"socket number", `,"socket":5`, `conflist key socket=5 is not valid: write an absolute path of at most 107 bytes, default /run/portolan/cni/cni.sock`},
		{"socket relative", `,"socket":"run/x"`, `conflist key socket="run/x" is not valid`},
		{"socket empty", `,"socket":""`, `conflist key socket="" is not valid`},
		{"socket long", `,"socket":"/` + strings.Repeat("s", 107) + `"`, `conflist key socket="/ssssssssssssssssssssssssssssssssssssss... is not valid`},
		{"timeout zero", `,"timeoutSeconds":0`, `conflist key timeoutSeconds=0 is not valid: write a whole number of seconds, 1-60, default 5`},
		{"timeout large", `,"timeoutSeconds":61`, `timeoutSeconds=61 is not valid`},
		{"timeout text", `,"timeoutSeconds":"5"`, `timeoutSeconds="5" is not valid`},
		{"timeout fraction", `,"timeoutSeconds":1.5`, `timeoutSeconds=1.5 is not valid`},
		{"status text", `,"reportStatus":"yes"`, `reportStatus="yes" is not valid: write true or false, default false`},
		{"bypass text", `,"bypassNamespaces":"kube-system"`, `bypassNamespaces="kube-system" is not valid: write a list of namespaces`},
		{"spool", `,"spoolDir":"x"`, `spoolDir="x" is not valid: write an absolute path, default /run/portolan/spool`},
		{"netns", `,"netnsDir":["x"]`, `netnsDir=["x"] is not valid`},
		{"runtimeConfig", `,"runtimeConfig":[]`, `runtimeConfig=[] is not valid: write an object`},
		{"annotations", `,"runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"a":1}}`, `runtimeConfig/io.kubernetes.cri.pod-annotations={"a":1} is not valid`},
		{"attachments", `,"cni.dev/valid-attachments":{}`, `cni.dev/valid-attachments={} is not valid`},
		{"first of two", `,"netnsDir":"x","socket":"y"`, `socket="y"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Parse(stdin(tc.more))
			e, ok := errors.AsType[*types.Error](err)
			if !ok || e.Code != types.ErrInvalidNetworkConfig || !strings.Contains(e.Msg, tc.want) || len(e.Msg) > 200 {
				t.Fatalf("Parse = %v, want code 7 with %q in less than 200 bytes", err, tc.want)
			}
			if d := cmp.Diff(defaults(), got, cmpopts.IgnoreUnexported(Config{})); d != "" {
				t.Errorf("what is left (-want +got):\n%s", d)
			}
		})
	}
	for _, text := range []string{"", "[]", "nonsense", `{"name":`} {
		if e, ok := errors.AsType[*types.Error](second(Parse([]byte(text)))); !ok || e.Code != types.ErrDecodingFailure {
			t.Errorf("Parse(%q) = %v, want code 6", text, e)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// CNI-45: annotations that the runtime does not pass are not the same as none.
func TestParseAnnotations(t *testing.T) {
	const key = `"io.kubernetes.cri.pod-annotations"`
	for _, tc := range []struct {
		name, more string
		want       map[string]string
		known      bool
	}{
		{"no runtimeConfig", ``, nil, false},
		{"empty runtimeConfig", `,"runtimeConfig":{}`, nil, false},
		{"another capability", `,"runtimeConfig":{"portMappings":[]}`, nil, false},
		{"null", `,"runtimeConfig":{` + key + `:null}`, nil, false},
		{"no annotation", `,"runtimeConfig":{` + key + `:{}}`, map[string]string{}, true},
		{"some", `,"runtimeConfig":{` + key + `:{"a":"b"},"x":1}`, map[string]string{"a": "b"}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Parse(stdin(tc.more))
			if err != nil || got.AnnotationsKnown != tc.known || !reflect.DeepEqual(got.Annotations, tc.want) {
				t.Errorf("annotations = %v, known %t, %v", got.Annotations, got.AnnotationsKnown, err)
			}
		})
	}
}

// CNI-30: both spellings of the list are read; absent and null are no list, an
// empty list is one; of two lists both count.
func TestParseAttachments(t *testing.T) {
	const c1, c2 = `{"containerID":"c1","ifname":"eth0"}`, `{"containerID":"c2","ifname":"eth0"}`
	key := func(id string) types.GCAttachment { return types.GCAttachment{ContainerID: id, IfName: "eth0"} }
	for _, tc := range []struct {
		name, more string
		want       []types.GCAttachment
		known      bool
	}{
		{"absent", ``, nil, false},
		{"null", `,"cni.dev/valid-attachments":null,"cni.dev/attachments":null`, nil, false},
		{"empty", `,"cni.dev/valid-attachments":[]`, nil, true},
		{"the specification's key", `,"cni.dev/valid-attachments":[` + c1 + `]`, []types.GCAttachment{key("c1")}, true},
		{"the library's old key", `,"cni.dev/attachments":[` + c1 + `]`, []types.GCAttachment{key("c1")}, true},
		{"one null", `,"cni.dev/valid-attachments":null,"cni.dev/attachments":[` + c1 + `]`, []types.GCAttachment{key("c1")}, true},
		{"both", `,"cni.dev/valid-attachments":[` + c1 + `],"cni.dev/attachments":[` + c2 + `]`, []types.GCAttachment{key("c1"), key("c2")}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := Parse(stdin(tc.more))
			if err != nil || got.LiveKnown != tc.known || !reflect.DeepEqual(got.Live, tc.want) {
				t.Errorf("live = %v, known %t, %v", got.Live, got.LiveKnown, err)
			}
		})
	}
}

// Contract 4.1: the plugin decides by the bypass list and the pod's own word
// alone, and leaves everything else to the registrar.
func TestDecide(t *testing.T) {
	shop := Args{"K8S_POD_NAMESPACE": "shop"}
	for _, tc := range []struct {
		name        string
		args        Args
		annotations map[string]string
		want        Verdict
	}{
		{"nothing known", nil, nil, Ask},
		{"nothing said", shop, map[string]string{"a": "b"}, Ask},
		{"joins", shop, map[string]string{"aether.io/managed": "true"}, Join},
		{"joins by a port", shop, map[string]string{"endpoint.aether.io/ports": "none"}, Join},
		{"stays out", shop, map[string]string{"aether.io/managed": "false", "endpoint.aether.io/port": "8080"}, Pass},
		{"a bad word is refused by the registrar", shop, map[string]string{"aether.io/managed": "yes"}, Join},
		{"bypassed", Args{"K8S_POD_NAMESPACE": "kube-system"}, map[string]string{"aether.io/managed": "true"}, Pass},
		{"no namespace is no bypass", Args{}, nil, Ask},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := defaults()
			cfg.BypassNamespaces = append(cfg.BypassNamespaces, "")
			cfg.Annotations = tc.annotations
			got, why := cfg.Decide(tc.args)
			if got != tc.want || why == "" {
				t.Errorf("Decide = %v (%s), want %v", got, why, tc.want)
			}
		})
	}
}

// C25: pairs come in any order and with others; only the K8S_* ones are ours.
func TestParseArgs(t *testing.T) {
	for _, tc := range []struct {
		name, text string
		want       Args
		pod, err   string
	}{
		{"none", "", Args{}, "", ""},
		{"kubelet", "IgnoreUnknown=1;K8S_POD_UID=u;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;", Args{"K8S_POD_UID": "u", "K8S_POD_NAMESPACE": "shop", "K8S_POD_NAME": "web-0"}, "shop/web-0", ""},
		{"value with =", "K8S_X=a=b", Args{"K8S_X": "a=b"}, "", ""},
		{"no pair", "K8S_POD_NAME=a;junk;K8S_Y=b", Args{"K8S_POD_NAME": "a", "K8S_Y": "b"}, "/a", `CNI_ARGS: "junk" is no KEY=VALUE pair`},
		{"no key", "=x", Args{}, "", `CNI_ARGS: "=x"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := ParseArgs(tc.text)
			if !reflect.DeepEqual(got, tc.want) || got.Pod() != tc.pod {
				t.Errorf("ParseArgs = %v of %q, want %v of %q", got, got.Pod(), tc.want, tc.pod)
			}
			e, ok := errors.AsType[*types.Error](err)
			if (tc.err != "") != ok || ok && (e.Code != types.ErrInvalidEnvironmentVariables || !strings.Contains(e.Msg, tc.err)) {
				t.Errorf("error = %v, want code 4 with %q", err, tc.err)
			}
		})
	}
}

// FuzzParse proves that no standard input breaks the parser, that a refusal is
// always a CNI error, and that what ADD would print is valid JSON at the
// configuration's version.
func FuzzParse(f *testing.F) {
	f.Add(stdin(``))
	f.Add(stdin(`,"timeoutSeconds":-1,"runtimeConfig":{"io.kubernetes.cri.pod-annotations":null}`))
	f.Add(stdin(`,"cni.dev/attachments":[{"containerID":"c1","ifname":"eth0"}]`))
	f.Add(stdin(`,"prevResult":{"ips":[{"address":"10.0.0.2/24"}]}`))
	f.Add([]byte(`{"prevResult":{"cniVersion":"1.0.0","ips":[{"Address":"::/0"}]}}`))
	f.Add([]byte(`{"cniVersion":"0.3.1","name":"n","prevResult":{"cniVersion":"1.0.0","ips":[{"address":"::1/64"}]}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		cfg, err := Parse(in)
		if _, ok := errors.AsType[*types.Error](err); err != nil && !ok {
			t.Fatalf("%T is no CNI error", err)
		}
		if !strings.HasPrefix(cfg.Socket, "/") || cfg.Timeout < time.Second || cfg.Timeout > time.Minute {
			t.Fatalf("unusable: %+v", cfg)
		}
		if cfg.CNIVersion == "" {
			return // the library reads 0.1.0 there and refuses it before us
		}
		prev, err := cfg.Previous()
		if err != nil {
			if _, ok := errors.AsType[*types.Error](err); !ok {
				t.Fatalf("%T is no CNI error", err)
			}
			return
		}
		var doc struct {
			CNIVersion string `json:"cniVersion"`
		}
		if err := json.Unmarshal(prev.Document, &doc); err != nil || doc.CNIVersion != cfg.CNIVersion || len(prev.Addresses) == 0 {
			t.Fatalf("document %s: %v", prev.Document, err)
		}
	})
}
