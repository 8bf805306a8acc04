package netconf

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
)

func withPrevious(t *testing.T, version, result string) (Previous, error) {
	t.Helper()
	cfg, err := Parse(fmt.Appendf(nil, `{"cniVersion":%q,"name":"net","prevResult":%s}`, version, result))
	if err != nil {
		t.Fatal(err)
	}
	return cfg.Previous()
}

func asJSON(t *testing.T, text []byte) any {
	t.Helper()
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return v
}

// CNI-42, CNI-43: a result of each version comes out deep-equal, with routes,
// dns, mtu, sandbox, interface index, socketPath, pciID and fields that nobody
// knows; at another version than its own it is converted.
func TestPreviousGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/prev-*.json")
	if err != nil || len(files) != 5 {
		t.Fatalf("golden results: %v, %v, want one for each version", files, err)
	}
	for _, file := range files {
		version := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "prev-"), ".json")
		t.Run(version, func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			prev, err := withPrevious(t, version, string(text))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(asJSON(t, text), asJSON(t, prev.Document)); d != "" {
				t.Errorf("document (-want +got):\n%s", d)
			}
			if got := fmt.Sprint(prev.Addresses, prev.Nameservers); got != "[10.1.0.5 fd01::5] [10.96.0.10 fd00::a]" {
				t.Errorf("addresses and nameservers = %s", got)
			}
			for _, other := range []string{"0.3.0", "0.4.0", "1.0.0", "1.1.0"} {
				prev, err := withPrevious(t, other, string(text))
				if err != nil {
					t.Errorf("at %s: %v", other, err)
					continue
				}
				var got struct {
					CNIVersion string `json:"cniVersion"`
					IPs        []any  `json:"ips"`
				}
				if err := json.Unmarshal(prev.Document, &got); err != nil || got.CNIVersion != other || len(got.IPs) != 3 {
					t.Errorf("at %s: %s, %v", other, prev.Document, err)
				}
			}
		})
	}
}

// A result without a version has the configuration's, as libraries read it.
func TestPreviousWithoutVersion(t *testing.T) {
	prev, err := withPrevious(t, "1.0.0", `{"ips":[{"address":"10.0.0.2/24"}],"x":[1]}`)
	if err != nil {
		t.Fatal(err)
	}
	want := asJSON(t, []byte(`{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.2/24"}],"x":[1]}`))
	if d := cmp.Diff(want, asJSON(t, prev.Document)); d != "" {
		t.Errorf("document (-want +got):\n%s", d)
	}
}

// CNI-41: without a result, or without an address of the pod in it, ADD is code 7
// with a remedy; so it is with a result that cannot be read.
func TestPreviousRefuses(t *testing.T) {
	for _, tc := range []struct{ name, result, want string }{
		{"null", `null`, "no prevResult"},
		{"empty", `{}`, "prevResult has no address"},
		{"no addresses", `{"cniVersion":"1.1.0","ips":[]}`, "prevResult has no address"},
		{"only the host's", `{"cniVersion":"1.1.0","interfaces":[{"name":"cni0"}],"ips":[{"interface":0,"address":"10.0.0.1/24"}]}`, "prevResult has no address"},
		{"damaged address", `{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.2"}]}`, "prevResult cannot be read"},
		{"unknown version", `{"cniVersion":"9.9.9","ips":[{"address":"10.0.0.2/24"}]}`, "prevResult cannot be read"},
		{"no object", `[]`, "prevResult cannot be read"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := withPrevious(t, "1.1.0", tc.result)
			e, ok := errors.AsType[*types.Error](err)
			if !ok || e.Code != types.ErrInvalidNetworkConfig || !strings.Contains(e.Msg, tc.want) || len(e.Msg) > 200 {
				t.Errorf("Previous = %v, want code 7 with %q", err, tc.want)
			}
		})
	}
	cfg, err := Parse(stdin(``))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cfg.Previous(); err == nil {
		t.Error("an absent prevResult is accepted")
	}
}
