package identity_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// A restarted registrar has byte for byte the same bundle and SVIDs and asks the
// signer for nothing: Envoy is sent no secret again (contract 4.8).
func TestRestartKeepsSVIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		first := map[model.Identity]identity.SVID{}
		for i := range 20 {
			id := account(fmt.Sprintf("a%d", i))
			first[id] = r.ensure(t, id)
		}
		bundle := r.Bundle()
		r.stop()
		time.Sleep(10 * time.Hour)

		r = start(t, dir, newSigner(t, dir), nil)
		for id, want := range first {
			if got := r.ensure(t, id); !equalSVID(got, want) {
				t.Errorf("%s has another SVID after the restart", id.Account)
			}
		}
		if !bytes.Equal(r.Bundle().PEM(), bundle.PEM()) {
			t.Error("another bundle after the restart")
		}
		if signed, asked := r.signer.counts(); signed+asked != 0 {
			t.Errorf("%d signatures after the restart", asked)
		}
		// Renewed at the time that was set before the restart.
		time.Sleep(2*time.Hour + time.Minute)
		synctest.Wait()
		if signed, _ := r.signer.counts(); signed != len(first) {
			t.Errorf("%d of %d renewed by half-life", signed, len(first))
		}
	})
}

// After a restart past half-life an SVID is new; with the signer away the stored
// one serves until it expires and is renewed when the signer is back; an expired
// one is never used.
func TestRestartPastHalfLife(t *testing.T) {
	tests := []struct {
		name  string
		after time.Duration
		away  func(*fakeSigner)
		want  string // same, new or error
	}{
		{"signer there", 13 * time.Hour, func(*fakeSigner) {}, "new"},
		{"signer away", 13 * time.Hour, func(f *fakeSigner) { f.away = true }, "same"},
		{"nobody answers", 13 * time.Hour, func(f *fakeSigner) { f.hang = true }, "same"},
		{"signer away, expired", 25 * time.Hour, func(f *fakeSigner) { f.away = true }, "error"},
		{"signer there, expired", 25 * time.Hour, func(*fakeSigner) {}, "new"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				id := account("checkout")
				r := start(t, dir, newSigner(t, dir), nil)
				old := r.ensure(t, id)
				r.stop()
				time.Sleep(tt.after)
				signer := newSigner(t, dir)
				r = start(t, dir, signer, nil)
				if err := waitBundle(r); err != nil {
					t.Fatal(err)
				}
				signer.set(tt.away)
				begin := time.Now()
				s, err := r.Ensure(t.Context(), id)
				if took := time.Since(begin); took > 5*time.Second {
					t.Errorf("took %v", took)
				}
				got := "new"
				switch {
				case err != nil:
					got = "error"
				case equalSVID(s, old):
					got = "same"
				}
				if got != tt.want {
					t.Fatalf("%s (%v), want %s", got, err, tt.want)
				}
				signer.set(func(f *fakeSigner) { f.away, f.hang = false, false })
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				if tt.want == "same" && equalSVID(r.told.svid(id), old) {
					t.Error("not renewed after the signer's return")
				}
			})
		})
	}
}

// While nobody answers a restart with many identities past half-life waits once, not for
// each of them; all are renewed when somebody does.
func TestRestartWhileNobodyAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		r := start(t, dir, newSigner(t, dir), nil)
		var ids []model.Identity
		for i := range 20 {
			ids = append(ids, account(fmt.Sprintf("a%d", i)))
			r.ensure(t, ids[i])
		}
		r.stop()
		time.Sleep(13 * time.Hour)
		signer := newSigner(t, dir)
		r = start(t, dir, signer, nil)
		if err := waitBundle(r); err != nil {
			t.Fatal(err)
		}
		signer.set(func(f *fakeSigner) { f.hang = true })
		begin := time.Now()
		for _, id := range ids {
			if _, err := r.Ensure(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(begin); took > 5*time.Second {
			t.Errorf("took %v", took)
		}
		signer.set(func(f *fakeSigner) { f.hang = false })
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		if signed, _ := signer.counts(); signed != len(ids) {
			t.Errorf("%d of %d renewed", signed, len(ids))
		}
	})
}

// A signer that answers is not away, whatever it answers: then the next identity past
// half-life gets a new certificate at once.
func TestRestartWhileSignerAnswers(t *testing.T) {
	first, second := account("first"), account("second")
	for _, tt := range []struct {
		name string
		// ensure asks for a certificate of first while the signer does not give it, and has
		// the signer answer.
		ensure func(t *testing.T, r *rig)
	}{
		{"refused", func(t *testing.T, r *rig) {
			t.Helper()
			r.signer.set(func(f *fakeSigner) { f.refuse[first] = true })
			r.ensure(t, first)
		}},
		{"back", func(t *testing.T, r *rig) {
			t.Helper()
			r.signer.set(func(f *fakeSigner) { f.away = true })
			r.ensure(t, first)
			r.signer.set(func(f *fakeSigner) { f.away = false })
			r.ensure(t, account("new"))
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				r := start(t, dir, newSigner(t, dir), nil)
				r.ensure(t, first)
				old := r.ensure(t, second)
				r.stop()
				time.Sleep(13 * time.Hour)
				r = start(t, dir, newSigner(t, dir), nil)
				if err := waitBundle(r); err != nil {
					t.Fatal(err)
				}
				tt.ensure(t, r)
				if equalSVID(r.ensure(t, second), old) {
					t.Error("the stored certificate is used, as if the signer were away")
				}
			})
		})
	}
}

// waitBundle waits until Run has fetched the bundle.
func waitBundle(r *rig) error {
	synctest.Wait()
	if len(r.Bundle().Roots) == 0 {
		return errors.New("no bundle")
	}
	return nil
}

// A stored SVID that is damaged, another one's, or of a root that is gone is
// replaced, with a log line that names the file.
func TestRestartWithDamagedFiles(t *testing.T) {
	damage := map[string]func(t *testing.T, r *rig, file string){
		"empty":   func(t *testing.T, _ *rig, file string) { t.Helper(); writeFile(t, file, nil) },
		"garbage": func(t *testing.T, _ *rig, file string) { t.Helper(); writeFile(t, file, []byte("\x00\x01junk")) },
		"cut short": func(t *testing.T, _ *rig, file string) {
			t.Helper()
			data := readFile(t, file)
			writeFile(t, file, data[:len(data)-40])
		},
		"key only": func(t *testing.T, _ *rig, file string) {
			t.Helper()
			data := readFile(t, file)
			writeFile(t, file, data[:bytes.Index(data, []byte("-----BEGIN CERT"))])
		},
		"junk after": func(t *testing.T, _ *rig, file string) {
			t.Helper()
			writeFile(t, file, append(readFile(t, file), "junk"...))
		},
		"a folder": func(t *testing.T, _ *rig, file string) {
			t.Helper()
			if err := errors.Join(os.Remove(file), os.Mkdir(file, 0o700)); err != nil {
				t.Fatal(err)
			}
		},
		"another identity's": func(t *testing.T, r *rig, file string) {
			t.Helper()
			r.ensure(t, account("other"))
			for _, f := range r.files(t) {
				if f != file {
					writeFile(t, file, readFile(t, f))
				}
			}
		},
		"another key": func(t *testing.T, r *rig, file string) {
			t.Helper()
			r.ensure(t, account("other"))
			for _, f := range r.files(t) {
				if f == file {
					continue
				}
				own, other := readFile(t, file), readFile(t, f)
				cert := []byte("-----BEGIN CERT")
				writeFile(t, file, append(bytes.Clone(other[:bytes.Index(other, cert)]), own[bytes.Index(own, cert):]...))
			}
		},
		"root remade": func(t *testing.T, r *rig, _ string) {
			t.Helper()
			writeFile(t, filepath.Join(r.dir, "ca.pem"), []byte("junk"))
		},
	}
	for name, do := range damage {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				id := account("checkout")
				r := start(t, dir, newSigner(t, dir), nil)
				old := r.ensure(t, id)
				file := r.files(t)[0]
				do(t, r, file)
				r.stop()

				r = start(t, dir, newSigner(t, dir), nil)
				s := r.ensure(t, id)
				if equalSVID(s, old) || bytes.Equal(s.KeyPEM, old.KeyPEM) {
					t.Error("not replaced")
				}
				if err := verify(leafOf(t, s), r.Bundle(), time.Now()); err != nil {
					t.Error(err)
				}
				if !strings.Contains(r.log.String(), file) || !strings.Contains(r.log.String(), "a new one is signed") {
					t.Errorf("the log does not name %s:\n%s", file, r.log)
				}
			})
		})
	}
}

// Keys in the store are readable by their owner alone, and what no certificate
// can need any more is removed when the store is opened.
func TestFileStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "svids")
	open := func() *identity.FileStore {
		t.Helper()
		s, err := identity.OpenFileStore(dir, time.Now, quiet())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	if got, err := s.Get("k"); got != nil || err != nil {
		t.Errorf("empty store: %q, %v", got, err)
	}
	for _, v := range []string{"one", "two"} {
		if err := s.Put("k", []byte(v)); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := s.Get("k"); string(got) != "two" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if d, f := stat(t, dir).Mode().Perm(), stat(t, s.Where("k")).Mode().Perm(); d != 0o700 || f != 0o600 {
		t.Errorf("modes %v, %v", d, f)
	}
	writeFile(t, s.Where("k")+".tmp-77", []byte("half"))
	writeFile(t, s.Where("old"), []byte("old"))
	day := time.Now().Add(-25 * time.Hour)
	if err := os.Chtimes(s.Where("old"), day, day); err != nil {
		t.Fatal(err)
	}
	s = open()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left %v, %v", left, err)
	}
	for range 2 {
		if err := s.Delete("k"); err != nil {
			t.Error(err)
		}
	}
	if got, err := s.Get("k"); got != nil || err != nil {
		t.Errorf("deleted: %q, %v", got, err)
	}
}
