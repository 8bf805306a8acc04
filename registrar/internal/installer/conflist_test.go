package installer

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

const (
	entryText = `{"type":"portolan","capabilities":{"io.kubernetes.cri.pod-annotations":true}}`
	flannel   = `{
  "name": "cbr0",
  "cniVersion": "0.3.1",
  "plugins": [
    {
      "type": "flannel",
      "delegate": {"hairpinMode": true, "isDefaultGateway": true}
    },
    {
      "type": "portmap",
      "capabilities": {"portMappings": true}
    }
  ]
}
`
)

// The entry as it is written has the type and the capability, and of the rest only
// what the plugin would not assume by itself.
func TestEntry(t *testing.T) {
	tests := []struct {
		name  string
		entry Entry
		want  string
	}{
		{"defaults", Entry{}, entryText},
		{
			"everything",
			Entry{Socket: "/s", SpoolDir: "/sp", NetnsDir: "/n", BypassNamespaces: []string{"kube-system", "mesh"}},
			strings.TrimSuffix(entryText, "}") + `,"socket":"/s","spoolDir":"/sp","netnsDir":"/n","bypassNamespaces":["kube-system","mesh"]}`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := tt.entry.JSON()
			if err != nil || string(got) != tt.want {
				t.Errorf("%s, %v, want %s", got, err, tt.want)
			}
			if !isOurs(got) {
				t.Error("the entry is not recognized as ours")
			}
		})
	}
}

// Insert puts the entry behind another plugin exactly once, keeps every byte that is
// not ours, and leaves a list that is right as it is.
func TestInsert(t *testing.T) {
	const old = `{"type":"portolan","socket":"/old"}`
	tests := []struct{ name, in, want string }{
		{"as its author formats", flannel, strings.Replace(flannel, "true}\n    }\n  ]", "true}\n    },\n    "+entryText+"\n  ]", 1)},
		{"one plugin on one line", `{"name":"n","plugins":[{"type":"a"}]}`, `{"name":"n","plugins":[{"type":"a"},` + entryText + `]}`},
		{"as between the plugins before", `{"plugins":[{"type":"a"} , {"type":"b"}]}`, `{"plugins":[{"type":"a"} , {"type":"b"} , ` + entryText + `]}`},
		{"right already, in another spelling", `{"plugins":[{"type":"a"},{ "capabilities":{"io.kubernetes.cri.pod-annotations":true}, "type":"portolan"}]}`, ""},
		{"somebody chained behind us", `{"plugins":[{"type":"a"},` + entryText + `,{"type":"z"}]}`, ""},
		{"outdated", `{"plugins":[{"type":"a"}, ` + old + ` ,{"type":"z"}]}`, `{"plugins":[{"type":"a"}, ` + entryText + ` ,{"type":"z"}]}`},
		{"twice", `{"plugins":[{"type":"a"},` + old + `, ` + entryText + `]}`, `{"plugins":[{"type":"a"},` + entryText + `]}`},
		{"first", `{"plugins":[ ` + old + `, {"type":"a"}]}`, `{"plugins":[ {"type":"a"}, ` + entryText + `]}`},
		{"first and twice", `{"plugins":[` + old + `,` + old + `,{"type":"a"},{"type":"b"}]}`, `{"plugins":[{"type":"a"},{"type":"b"},` + entryText + `]}`},
		{"the key twice: runtimes take the last", `{"plugins":[{"type":"x"}],"plugins":[{"type":"a"}]}`, `{"plugins":[{"type":"x"}],"plugins":[{"type":"a"},` + entryText + `]}`},
		{"the key escaped", `{"plug\u0069ns":[{"type":"a"}]}`, `{"plug\u0069ns":[{"type":"a"},` + entryText + `]}`},
		{"our name in capitals of the key", `{"plugins":[{"type":"a"},{"Type":"portolan"}]}`, `{"plugins":[{"type":"a"},` + entryText + `]}`},
		{"numbers keep their digits", `{"mtu":1.50e+03,"plugins":[{"type":"a","id":12345678901234567890}]}`, `{"mtu":1.50e+03,"plugins":[{"type":"a","id":12345678901234567890},` + entryText + `]}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.want == "" {
				tt.want = tt.in
			}
			got, err := Insert([]byte(tt.in), []byte(entryText))
			if err != nil || string(got) != tt.want {
				t.Fatalf("%v\n%s\nwant\n%s", err, got, tt.want)
			}
			l, err := parseList(got)
			if err != nil || !l.chained() {
				t.Errorf("not chained afterwards: %v", err)
			}
		})
	}
}

// What cannot be a chain with us is refused and named, never edited.
func TestInsertRefuses(t *testing.T) {
	for _, in := range []string{
		``, ` `, `{`, `null`, `[]`, `"x"`, `{}`, `{"plugins":{}}`, `{"plugins":[]}`, `{"plugins":null}`, `{"plugins":[{"type":"a"}]} x`,
		"\xef\xbb\xbf" + flannel, `{"plugins":[` + entryText + `]}`,
	} {
		if got, err := Insert([]byte(in), []byte(entryText)); err == nil {
			t.Errorf("%q became %q", in, got)
		}
	}
	if _, err := Remove([]byte(`{"plugins":[` + entryText + `]}`)); !errors.Is(err, errAlone) {
		t.Errorf("removing the only plugin: %v", err)
	}
}

// A single configuration becomes the list that libcni itself would make of it, with
// us behind; a list stays the network that it is (CNI-8).
func TestOwnedList(t *testing.T) {
	tests := []struct{ name, file, text string }{
		{"single", "10-x.conf", ` {"cniVersion":"0.4.0","name":"k8s-pod-network","type":"calico","ipam":{"type":"calico-ipam"},"mtu":0} ` + "\n"},
		{"list", "10-x.conflist", flannel},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			put(t, dir, tt.file, tt.text)
			f, err := look(dir)
			if err != nil || f.source == nil {
				t.Fatalf("no source: %v", err)
			}
			text, err := ownedList(*f.source, []byte(entryText))
			if err != nil {
				t.Fatal(err)
			}
			if !isOwned(text) || isOwned([]byte(tt.text)) {
				t.Error("owned lists cannot be told from foreign ones")
			}
			got, err := libcni.NetworkConfFromBytes(text)
			if err != nil {
				t.Fatal(err)
			}
			want, err := load(dir)
			if err != nil {
				t.Fatal(err)
			}
			if got.Name != want.Name || got.CNIVersion != want.CNIVersion || len(got.Plugins) != len(want.Plugins)+1 {
				t.Fatalf("network %s %s of %d plugins, want %s %s and one more than %d",
					got.Name, got.CNIVersion, len(got.Plugins), want.Name, want.CNIVersion, len(want.Plugins))
			}
			for n, p := range want.Plugins {
				if !equal(got.Plugins[n].Bytes, p.Bytes) {
					t.Errorf("plugin %d is %s, want %s", n, got.Plugins[n].Bytes, p.Bytes)
				}
			}
		})
	}
}

// Whatever is in a file: an edit that is made keeps the meaning of everything of
// others, is JSON that libcni takes if it took the original, is not made twice, and
// is undone without a trace.
func FuzzInsert(f *testing.F) {
	for _, seed := range []string{
		flannel, `{"plugins":[{"type":"a"}]}`, `{"plugins":[` + entryText + `,{"type":"a"},{"Type":"portolan"}]}`,
		`{"name":"n","cniVersion":"1.0.0","plugins":[{"type":"a"},{"type":"b"} , {"type":"c"}],"x":[1e999]}`,
		`{"plugins":[1,null,"x",[]],"plugins":5}`, `{"plugins":[{"type":"portolan"},{"type":"portolan"},0]}`, "{\"plugins\":\t[\n0]}",
		`{"plugins":[{"type":"\ud800"}]}`, `[]`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		orig := bytes.Clone(in)
		out, err := Insert(in, []byte(entryText))
		if !bytes.Equal(in, orig) {
			t.Fatal("the input was changed")
		}
		if err != nil {
			return
		}
		if !json.Valid(out) {
			t.Fatalf("%q became %q, which is no JSON", in, out)
		}
		if got, want := foreign(t, out), foreign(t, in); got != want {
			t.Fatalf("others' part was\n%s\nand became\n%s", want, got)
		}
		again, err := Insert(out, []byte(entryText))
		if err != nil || !bytes.Equal(again, out) {
			t.Fatalf("a second time made %q of %q: %v", again, out, err)
		}
		if _, errIn := libcni.NetworkConfFromBytes(in); errIn == nil {
			if _, err := libcni.NetworkConfFromBytes(out); err != nil {
				t.Fatalf("libcni took %q and refuses %q: %v", in, out, err)
			}
		}
		back, err := Remove(out)
		if err != nil {
			t.Fatal(err)
		}
		clean, err := Remove(in)
		if err != nil {
			t.Fatal(err)
		}
		// With entries of ours in the input, a stay for one of them may differ in white space.
		if l, _ := parseList(in); !l.hasOurs() && !bytes.Equal(back, in) || !equal(back, clean) && json.Valid(clean) && validNumbers(clean) {
			t.Fatalf("removed from %q leaves %q, want %q", out, back, clean)
		}
	})
}

func (l conflist) hasOurs() bool {
	for _, s := range l.plugins {
		if s.ours {
			return true
		}
	}
	return false
}

func validNumbers(text []byte) bool { _, err := canonical(text); return err == nil }

// foreign is the canonical form of a list without our entries.
func foreign(t *testing.T, text []byte) string {
	t.Helper()
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		t.Fatal(err)
	}
	var plugins []json.RawMessage
	if err := json.Unmarshal(fields["plugins"], &plugins); err != nil {
		t.Fatal(err)
	}
	var keep []json.RawMessage
	for _, p := range plugins {
		if !isOurs(p) {
			keep = append(keep, p)
		}
	}
	var err error
	if fields["plugins"], err = json.Marshal(keep); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	c, err := canonical(out)
	if err != nil {
		t.Fatal(err)
	}
	return string(c)
}
