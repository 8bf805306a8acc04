package state

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/scripts/disktest"
)

// noon is the time of every test.
var noon = time.Date(2026, 5, 4, 12, 0, 0, 0, time.FixedZone("", 2*3600))

const nameAtNoon = "state.db.corrupt-20260504T100000Z"

// open opens path at noon and returns what was logged; the DB is closed at the end.
func open(t *testing.T, path string) (*bbolt.DB, Recovery, string, error) {
	t.Helper()
	var logged bytes.Buffer
	o := opener{
		path: path, log: slog.New(slog.NewTextHandler(&logged, nil)),
		now: func() time.Time { return noon }, lockTimeout: 2 * lockRetry,
	}
	db, recovery, err := o.open()
	if err == nil {
		t.Cleanup(func() { _ = db.Close() })
	}
	return db, recovery, logged.String(), err
}

// must fails the test on an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// build makes a file with everything that the format has: branches, overflow,
// small and large and nested buckets, free pages. It returns its path.
func build(tb testing.TB) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "state.db")
	db, _, err := Open(path, slog.New(slog.DiscardHandler))
	must(tb, err)
	must(tb, db.Update(func(tx *bbolt.Tx) error {
		large, err := tx.CreateBucket([]byte("large"))
		must(tb, err)
		for i := range 2000 {
			must(tb, large.Put(fmt.Appendf(nil, "key-%04d", i), bytes.Repeat([]byte{byte(i)}, 100)))
		}
		must(tb, large.Put([]byte("overflow"), make([]byte, 30_000)))
		small, err := tx.CreateBucket([]byte("small"))
		must(tb, err)
		must(tb, small.Put([]byte("a"), []byte("b")))
		outer, err := tx.CreateBucket([]byte("outer"))
		must(tb, err)
		for i := range 100 {
			inner, err := outer.CreateBucket(fmt.Appendf(nil, "inner-%d", i))
			must(tb, err)
			must(tb, inner.Put([]byte("k"), make([]byte, 10*i)))
		}
		_, err = tx.CreateBucket([]byte("empty"))
		return err
	}))
	for i := range 20 { // pages become free
		must(tb, db.Update(func(tx *bbolt.Tx) error {
			for j := range 50 {
				must(tb, tx.Bucket([]byte("large")).Delete(fmt.Appendf(nil, "key-%04d", i*50+j)))
			}
			return nil
		}))
	}
	must(tb, db.Close())
	return path
}

// keys returns how many keys the large bucket has; the file must be usable.
func keys(t *testing.T, db *bbolt.DB) (n int) {
	t.Helper()
	must(t, db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucketIfNotExists([]byte("large"))
		must(t, err)
		must(t, b.ForEach(func(_, _ []byte) error { n++; return nil }))
		return b.Put([]byte("zzz"), []byte("x"))
	}))
	return n
}

// A missing file is made, with its folders, for the owner alone; a good one is
// opened as it is; what was too open is closed.
func TestOpenGood(t *testing.T) {
	path := filepath.Join(t.TempDir(), "var", "lib", "state.db")
	db, recovery, logged, err := open(t, path)
	if err != nil || recovery != (Recovery{}) || logged != "" {
		t.Fatalf("%v, %+v, %s", err, recovery, logged)
	}
	keys(t, db)
	must(t, db.Close())
	for name, want := range map[string]fs.FileMode{path: 0o600, filepath.Dir(path): 0o700, filepath.Dir(filepath.Dir(path)): 0o700} {
		if info, err := os.Stat(name); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", name, info.Mode().Perm(), err, want)
		}
	}
	must(t, os.Chmod(path, 0o644))
	must(t, os.Chmod(filepath.Dir(path), 0o775))
	db, recovery, logged, err = open(t, path)
	if err != nil || recovery != (Recovery{}) || keys(t, db) != 1 {
		t.Fatalf("again: %v, %+v", err, recovery)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file has mode %v, %v", info.Mode().Perm(), err)
	}
	if !strings.Contains(logged, "chmod 0700") {
		t.Errorf("an open folder is not named: %q", logged)
	}
	must(t, db.Close())
	must(t, os.Chmod(filepath.Dir(path), 0o755)) // as a kubelet makes it
	if _, _, logged, err = open(t, path); err != nil || logged != "" {
		t.Errorf("in a folder that others can read: %v, %q", err, logged)
	}
}

// A file with branches, overflow pages, nested buckets and free pages is taken as
// good at every point of its life.
func TestOpenKeepsGoodFiles(t *testing.T) {
	path := build(t)
	random := rand.New(rand.NewPCG(1, 2))
	for range 15 {
		db, recovery, _, err := open(t, path)
		if err != nil || recovery != (Recovery{}) {
			t.Fatalf("%v, %+v", err, recovery)
		}
		for range 5 {
			must(t, db.Update(func(tx *bbolt.Tx) error {
				b := tx.Bucket([]byte("large"))
				for range 100 {
					key := fmt.Appendf(nil, "key-%04d", random.IntN(3000))
					if random.IntN(2) == 0 {
						must(t, b.Delete(key))
					} else {
						must(t, b.Put(key, make([]byte, random.IntN(9000))))
					}
				}
				return nil
			}))
		}
		must(t, db.Close())
	}
}

// A damaged file is set aside under a name of the time, whole, named in the log
// and in the Recovery with the reason, and a fresh one is usable in its place.
func TestOpenDamaged(t *testing.T) {
	good, err := os.ReadFile(build(t))
	must(t, err)
	pageSize := os.Getpagesize()
	root := func(file []byte) int { // where the root page of the newest state is
		m, err := newestMeta(bytes.NewReader(file), int64(len(file)))
		must(t, err)
		return int(m.root) * pageSize
	}
	for _, tt := range []struct {
		name   string
		damage func([]byte) []byte
		reason string
	}{
		{"random bytes", func(f []byte) []byte {
			random := rand.NewChaCha8([32]byte{1})
			_, _ = random.Read(f)
			return f
		}, "not a bbolt file"},
		{"text", func([]byte) []byte { return []byte(strings.Repeat("not a database\n", 5000)) }, "not a bbolt file"},
		{"one byte", func([]byte) []byte { return []byte{0} }, "cut short within the first pages"},
		{"zeros", func(f []byte) []byte { return make([]byte, len(f)) }, "not a bbolt file"},
		{"cut in the middle", func(f []byte) []byte { return f[:len(f)/2] }, "cut short: "},
		{"cut after the meta pages", func(f []byte) []byte { return f[:2*pageSize] }, "cut short: 2 pages of "},
		{"cut within a page", func(f []byte) []byte { return f[:3*pageSize+100] }, "cut short: 3 pages of "},
		{"zeroed root page", func(f []byte) []byte { clear(f[root(f):][:pageSize]); return f }, "it says that it is page 0"},
		{"both meta pages zeroed", func(f []byte) []byte { clear(f[:2*pageSize]); return f }, "not a bbolt file"},
		{"bad checksums", func(f []byte) []byte { f[16+50]++; f[pageSize+16+50]++; return f }, "bad checksum of the meta page"},
		{"another version", func(f []byte) []byte { f[16+4]++; f[pageSize+16+4]++; return f }, "not a bbolt file"},
		{"root page of a wrong kind", func(f []byte) []byte { f[root(f)+8] = flagFreelist; return f }, "neither branch nor leaf"},
		{"too many elements", func(f []byte) []byte {
			binary.NativeEndian.PutUint16(f[root(f)+10:], 60_000)
			return f
		}, "page "},
		{"element beyond the page", func(f []byte) []byte {
			binary.NativeEndian.PutUint32(f[root(f)+headerSize+4:], 1<<30)
			return f
		}, "an element lies beyond its end"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			damaged := tt.damage(bytes.Clone(good))
			path := filepath.Join(t.TempDir(), "state.db")
			must(t, os.WriteFile(path, damaged, 0o600))
			db, recovery, logged, err := open(t, path)
			if err != nil {
				t.Fatal(err)
			}
			aside := filepath.Join(filepath.Dir(path), nameAtNoon)
			if recovery.SetAside != aside || !strings.Contains(recovery.Reason, tt.reason) {
				t.Errorf("%+v, want %s and %q", recovery, aside, tt.reason)
			}
			if kept, err := os.ReadFile(aside); err != nil || !bytes.Equal(kept, damaged) {
				t.Errorf("what was kept is not what was there: %v", err)
			}
			for _, text := range []string{aside, recovery.Reason, "level=ERROR"} {
				if !strings.Contains(strings.ReplaceAll(logged, `\"`, `"`), text) {
					t.Errorf("the log does not say %q: %s", text, logged)
				}
			}
			if n := keys(t, db); n != 0 {
				t.Errorf("the fresh file has %d keys", n)
			}
		})
	}
}

// One torn meta page is what a crash may leave: the other one counts, and nothing
// is lost.
func TestOpenTornMeta(t *testing.T) {
	good, err := os.ReadFile(build(t))
	must(t, err)
	for _, meta := range []int{0, 1} {
		file := bytes.Clone(good)
		clear(file[meta*os.Getpagesize():][:os.Getpagesize()])
		path := filepath.Join(t.TempDir(), "state.db")
		must(t, os.WriteFile(path, file, 0o600))
		db, recovery, _, err := open(t, path)
		if err != nil || recovery != (Recovery{}) {
			t.Fatalf("meta %d: %v, %+v", meta, err, recovery)
		}
		if n := keys(t, db); n < 1000 {
			t.Errorf("meta %d: %d keys", meta, n)
		}
	}
}

// An empty file, as a crash at the first start leaves it, has nothing to keep.
func TestOpenEmpty(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	must(t, os.WriteFile(path, nil, 0o600))
	db, recovery, logged, err := open(t, path)
	if err != nil || recovery != (Recovery{Reason: "the file was empty"}) || !strings.Contains(logged, "empty") {
		t.Fatalf("%v, %+v, %s", err, recovery, logged)
	}
	keys(t, db)
	must(t, db.Close())
	if _, recovery, _, err = open(t, path); err != nil || recovery != (Recovery{}) {
		t.Errorf("again: %v, %+v", err, recovery)
	}
}

// Two files damaged within a second are both kept.
func TestOpenKeepsEveryDamagedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	for i, want := range []string{nameAtNoon, nameAtNoon + "-2", nameAtNoon + "-3"} {
		must(t, os.WriteFile(path, fmt.Append(nil, i), 0o600))
		db, recovery, _, err := open(t, path)
		if err != nil || filepath.Base(recovery.SetAside) != want {
			t.Fatalf("%v, %+v, want %s", err, recovery, want)
		}
		must(t, db.Close())
		if kept, err := os.ReadFile(recovery.SetAside); err != nil || string(kept) != fmt.Sprint(i) {
			t.Errorf("%s holds %q, %v", want, kept, err)
		}
	}
}

// Whatever bytes of a file change, wherever it is cut, Open neither crashes nor
// loses it: it is opened, or set aside, and then usable.
func TestOpenRandomDamage(t *testing.T) {
	good, err := os.ReadFile(build(t))
	must(t, err)
	m, err := newestMeta(bytes.NewReader(good), int64(len(good)))
	must(t, err)
	pageSize, pages := os.Getpagesize(), int(m.pages)
	set, dir := 0, t.TempDir()
	for seed := range uint64(150) {
		random := rand.New(rand.NewPCG(seed, 7))
		file := bytes.Clone(good)
		for range 1 + random.IntN(3) {
			page := file[random.IntN(pages)*pageSize:][:pageSize]
			switch random.IntN(5) {
			case 0: // a lost page
				clear(page)
			case 1: // a page of something else
				copy(page, file[random.IntN(pages)*pageSize:][:pageSize])
			case 2: // rubbish with a header that looks right
				for i := headerSize; i < pageSize; i++ {
					page[i] = byte(random.Uint32())
				}
			case 3: // one wrong number in header or elements
				binary.NativeEndian.PutUint32(page[4*random.IntN(40):], random.Uint32())
			case 4: // a small wrong number
				binary.NativeEndian.PutUint16(page[2*random.IntN(80):], uint16(random.IntN(pages+2)))
			}
		}
		if random.IntN(10) == 0 {
			file = file[:random.IntN(len(file))]
		}
		path := filepath.Join(dir, fmt.Sprint(seed), "state.db")
		must(t, os.Mkdir(filepath.Dir(path), 0o700))
		must(t, os.WriteFile(path, file, 0o600))
		db, recovery, _, err := open(t, path)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if recovery.SetAside != "" {
			set++
		}
		keys(t, db)
		must(t, db.Close())
		must(t, os.RemoveAll(filepath.Dir(path)))
	}
	if set < 75 {
		t.Errorf("only %d of 150 files were set aside: the damage does not damage", set)
	}
}

// A file that another registrar has open is left alone, and the error says so.
func TestOpenLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	first, _, _, err := open(t, path)
	must(t, err)
	_, _, _, err = open(t, path)
	if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
	must(t, first.Close())
	if _, recovery, _, err := open(t, path); err != nil || recovery != (Recovery{}) {
		t.Errorf("after it was closed: %v, %+v", err, recovery)
	}
}

// A registrar that waits for its predecessor gets the file when that one goes.
func TestOpenWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	first, _, err := Open(path, slog.New(slog.DiscardHandler))
	must(t, err)
	closed := make(chan error, 1)
	timer := time.AfterFunc(5*lockRetry, func() { closed <- first.Close() })
	defer timer.Stop()
	second, _, err := Open(path, slog.New(slog.DiscardHandler))
	must(t, err)
	must(t, <-closed)
	must(t, second.Close())
}

// Registrars that start at once over one damaged file set it aside once, and never
// the fresh one of another.
func TestOpenRace(t *testing.T) {
	for range 20 {
		dir := t.TempDir()
		path := filepath.Join(dir, "state.db")
		must(t, os.WriteFile(path, []byte("damaged"), 0o600))
		results := make(chan error)
		for range 4 {
			go func() {
				db, _, err := Open(path, slog.New(slog.DiscardHandler))
				if err == nil {
					err = db.Update(func(tx *bbolt.Tx) error {
						b, err := tx.CreateBucketIfNotExists([]byte("b"))
						if err != nil {
							return err
						}
						id, err := b.NextSequence()
						if err != nil {
							return err
						}
						return b.Put(fmt.Append(nil, id), nil)
					})
					err = errors.Join(err, db.Close())
				}
				results <- err
			}()
		}
		for range 4 {
			must(t, <-results)
		}
		aside, err := filepath.Glob(filepath.Join(dir, "*corrupt*"))
		if err != nil || len(aside) != 1 {
			t.Errorf("set aside: %v, %v", aside, err)
		}
		db, recovery, _, err := open(t, path)
		must(t, err)
		must(t, db.View(func(tx *bbolt.Tx) error {
			if n := tx.Bucket([]byte("b")).Sequence(); n != 4 || recovery != (Recovery{}) {
				t.Errorf("%d of 4 wrote into the file that is there: %+v", n, recovery)
			}
			return nil
		}))
	}
}

// A file that is damaged at every start leaves the newest copies, not one for each.
func TestOldCopiesGo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	var names []string
	for hour := range 6 {
		must(t, os.WriteFile(path, fmt.Append(nil, hour), 0o600))
		o := opener{
			path: path, log: slog.New(slog.DiscardHandler), lockTimeout: lockRetry,
			now: func() time.Time { return noon.Add(time.Duration(hour) * time.Hour) },
		}
		db, recovery, err := o.open()
		must(t, err)
		must(t, db.Close())
		names = append(names, recovery.SetAside)
	}
	got, err := filepath.Glob(path + ".corrupt-*")
	must(t, err)
	if !slices.Equal(got, names[3:]) {
		t.Errorf("%v are left, want the last three of %v", got, names)
	}
}

// A folder that cannot be written, or has no space, is an error that names the path
// and the remedy; nothing half-made stays behind.
func TestOpenNoRoom(t *testing.T) {
	readOnly := disktest.Mount(t, "size=1m")
	must(t, os.WriteFile(filepath.Join(readOnly, "damaged.db"), []byte("damaged"), 0o600))
	disktest.Remount(t, readOnly, unix.MS_RDONLY, "")
	full := disktest.Mount(t, "size=8k,nr_inodes=10")
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	for _, tt := range []struct {
		name, path, want string
	}{
		{"read-only", filepath.Join(readOnly, "state.db"), "read-only file system; make " + readOnly + " writable or choose another path"},
		{"read-only, damaged file", filepath.Join(readOnly, "damaged.db"), "read-only file system; make "},
		{"read-only, new folder", filepath.Join(readOnly, "sub", "state.db"), "read-only file system; make "},
		{"full", filepath.Join(full, "state.db"), "no space left on device; free space on the file system of " + full},
		{"under a file", filepath.Join(file, "state.db"), "not a directory"},
		{"a folder", full, "is a directory"},
		{"a device", "/dev/null", "it is no regular file; choose another path"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			db, recovery, _, err := open(t, tt.path)
			if err == nil {
				t.Fatalf("opened: %v", db)
			}
			if !strings.HasPrefix(err.Error(), "open state file "+tt.path+": ") || !strings.Contains(err.Error(), tt.want) || recovery.SetAside != "" {
				t.Errorf("got  %v, %+v\nwant %s", err, recovery, tt.want)
			}
		})
	}
	if _, err := os.Stat(filepath.Join(full, "state.db")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("half a file is left behind: %v", err)
	}
}

// FuzzVerify holds: no bytes make the walk panic, run away or read past the file.
func FuzzVerify(f *testing.F) {
	good, err := os.ReadFile(build(f))
	must(f, err)
	small := good[:4*os.Getpagesize()]
	f.Add([]byte{}, uint32(0), uint64(0))
	f.Add(small, uint32(0), uint64(0))
	for at := range 64 {
		f.Add(small, uint32(16+at), uint64(at))
	}
	f.Fuzz(func(_ *testing.T, file []byte, at uint32, number uint64) {
		file = bytes.Clone(file)
		if int(at)+8 <= len(file) {
			binary.NativeEndian.PutUint64(file[at:], number)
		}
		_, _ = verify(bytes.NewReader(file), int64(len(file)))
	})
}

// BenchmarkOpen is what the checks cost at start, for about 50,000 records.
func BenchmarkOpen(b *testing.B) {
	path := filepath.Join(b.TempDir(), "state.db")
	log := slog.New(slog.DiscardHandler)
	db, _, err := Open(path, log)
	must(b, err)
	must(b, db.Update(func(tx *bbolt.Tx) error {
		bucket, err := tx.CreateBucket([]byte("endpoints"))
		must(b, err)
		for i := range 50_000 {
			must(b, bucket.Put(fmt.Appendf(nil, "%064d-eth0", i), make([]byte, 300)))
		}
		return nil
	}))
	must(b, db.Close())
	for b.Loop() {
		db, recovery, err := Open(path, log)
		if err != nil || recovery != (Recovery{}) {
			b.Fatal(err, recovery)
		}
		must(b, db.Close())
	}
}
