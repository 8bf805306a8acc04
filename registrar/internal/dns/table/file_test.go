package table_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

func someTable(tb testing.TB) *dnsv1.Table {
	tb.Helper()
	last := table.New()
	p := pod(1)
	p.IPv6, p.Upstreams = true, settings().Upstreams
	_, err := last.Apply(table.Change{
		Full: true, Settings: settings(),
		SetNames: map[string]table.VIP{"a.aether.internal": vip(1), "b.aether.internal": {V6: vip(2).V6}},
		SetPods:  map[model.AttachmentKey]table.Pod{key(1): p, key(2): pod(2)},
	})
	if err != nil {
		tb.Fatal(err)
	}
	return last.Message()
}

// The last table survives the process: what was saved is loaded, and as a change
// it makes the same table. The file is for us alone.
func TestFileRoundTrip(t *testing.T) {
	f := table.File{Path: filepath.Join(t.TempDir(), "dns.json")}
	if got, err := f.Load(); got != nil || err != nil {
		t.Fatalf("load without a file: %v, %v", got, err)
	}
	want := someTable(t)
	if err := f.Save(&dnsv1.Table{Settings: want.GetSettings()}); err != nil {
		t.Fatal(err)
	}
	if err := f.Save(want); err != nil {
		t.Fatal(err)
	}
	got, err := f.Load()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
		t.Errorf("table (-want +got):\n%s", d)
	}
	c, err := table.ChangeFrom(got)
	if err != nil {
		t.Fatal(err)
	}
	tb := table.New()
	apply(t, tb, c)
	if d := cmp.Diff(want, tb.Message(), protocmp.Transform()); d != "" {
		t.Errorf("table made of it (-want +got):\n%s", d)
	}
	info, err := os.Stat(f.Path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	entries, err := os.ReadDir(filepath.Dir(f.Path))
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// A file that is not usable is neither read again nor lost: it is set aside, the
// error names both files and the reason, and the next start is a clean one.
func TestFileCorrupt(t *testing.T) {
	valid := `{"version":1,"table":{"settings":{"meshDomain":"aether.internal"}}}`
	for _, tc := range []struct{ name, content, want string }{
		{name: "empty", content: "", want: "parse: unexpected end of JSON input"},
		{name: "cut off", content: valid[:30], want: "parse: unexpected end of JSON input"},
		{name: "no JSON", content: "\x00\x01", want: "parse: invalid character"},
		{name: "zeros after a power failure", content: strings.Repeat("\x00", 4096), want: "parse: invalid character"},
		{name: "newer version", content: `{"version":2,"table":{}}`, want: "version 2, this program reads version 1"},
		{name: "no version", content: `{"table":{}}`, want: "version 0, this program reads version 1"},
		{name: "no table", content: `{"version":1}`, want: "parse table"},
		{name: "table of another kind", content: `{"version":1,"table":[]}`, want: "parse table"},
		{name: "no settings", content: `{"version":1,"table":{}}`, want: "check table: settings.mesh_domain"},
		{name: "bad name", content: strings.Replace(valid, `"}}}`, `"},"names":[{"name":"localhost","vip4":"198.18.0.1"}]}}`, 1), want: `check table: names[0].name: "localhost" has one label`},
		{name: "a loop", content: strings.Replace(valid, `internal"`, `internal","upstreams":["127.0.0.1:15053"]`, 1), want: "is the mesh DNS itself"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := table.File{Path: filepath.Join(t.TempDir(), "dns.json")}
			if err := os.WriteFile(f.Path, []byte(tc.content), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := f.Load()
			var corrupt *table.CorruptError
			if got != nil || !errors.As(err, &corrupt) {
				t.Fatalf("%v, %v; want a *CorruptError", got, err)
			}
			for _, part := range []string{f.Path + " is not usable", "set aside as " + f.Path + ".corrupt", tc.want} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not say %q", err, part)
				}
			}
			if aside, err := os.ReadFile(f.Path + ".corrupt"); err != nil || string(aside) != tc.content {
				t.Errorf("set aside: %q, %v", aside, err)
			}
			if got, err := f.Load(); got != nil || err != nil {
				t.Errorf("second load: %v, %v; want a clean start", got, err)
			}
		})
	}
}

// A file that no table of ours can be is not even read.
func TestFileTooLarge(t *testing.T) {
	f := table.File{Path: filepath.Join(t.TempDir(), "dns.json")}
	if err := os.WriteFile(f.Path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(f.Path, 128<<20+1); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Load(); err == nil || !strings.Contains(err.Error(), "larger than 134217728 bytes") {
		t.Errorf("error %v", err)
	}
}

// Fields of a newer writer are ignored: the two processes are updated at
// different times, and so may be rolled back.
func TestFileUnknownFields(t *testing.T) {
	f := table.File{Path: filepath.Join(t.TempDir(), "dns.json")}
	content := `{"version":1,"more":1,"table":{"settings":{"meshDomain":"aether.internal","new":[1]},"newer":{}}}`
	if err := os.WriteFile(f.Path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := f.Load(); err != nil || got.GetSettings().GetMeshDomain() != "aether.internal" {
		t.Errorf("%v, %v", got, err)
	}
}

// Errors of the disk are not taken for a corrupt file, and a write that fails
// leaves the old table in place.
func TestFileDiskErrors(t *testing.T) {
	dir := t.TempDir()
	f := table.File{Path: filepath.Join(dir, "dns.json")}
	want := someTable(t)
	if err := f.Save(want); err != nil {
		t.Fatal(err)
	}
	// A folder in the way of the temporary file.
	if err := os.MkdirAll(filepath.Join(dir, "dns.json.tmp", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := f.Save(&dnsv1.Table{}); err == nil || !strings.Contains(err.Error(), "write table file "+f.Path) {
		t.Errorf("error %v", err)
	}
	if got, err := f.Load(); err != nil || !cmp.Equal(want, got, protocmp.Transform()) {
		t.Errorf("after a failed write: %v, %v", got, err)
	}
	other := table.File{Path: filepath.Join(dir, "dns.json.tmp")}
	var corrupt *table.CorruptError
	if _, err := other.Load(); err == nil || errors.As(err, &corrupt) {
		t.Errorf("a folder instead of a file: error %v", err)
	}
}

// No content of the file makes the loader panic, and what it accepts is a valid
// table that can be saved and loaded again.
func FuzzFileLoad(f *testing.F) {
	dir := f.TempDir()
	file := table.File{Path: filepath.Join(dir, "seed.json")}
	if err := file.Save(someTable(f)); err != nil {
		f.Fatal(err)
	}
	seed, err := os.ReadFile(file.Path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`{"version":1,"table":{}}`))
	f.Add([]byte(`{"version":1e0,"table":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		file := table.File{Path: filepath.Join(t.TempDir(), "dns.json")}
		if err := os.WriteFile(file.Path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := file.Load()
		if err != nil {
			return
		}
		if err := got.Validate(); err != nil {
			t.Fatalf("loaded, but not valid: %v", err)
		}
		c, err := table.ChangeFrom(got)
		if err != nil {
			t.Fatalf("loaded, but no change: %v", err)
		}
		tb := table.New()
		if _, err := tb.Apply(c); err != nil {
			t.Fatalf("loaded, but not applied: %v", err)
		}
		if err := file.Save(tb.Message()); err != nil {
			t.Fatal(err)
		}
		if again, err := file.Load(); err != nil || len(again.GetNames()) != len(got.GetNames()) {
			t.Fatalf("not loaded again: %v", err)
		}
	})
}
