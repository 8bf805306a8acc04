package unixsocket

import (
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func config(t *testing.T) Config {
	t.Helper()
	return Config{Path: filepath.Join(t.TempDir(), "xds", "xds.sock"), UID: Keep, GID: Keep}
}

// deadSocket leaves the file of a socket on which nobody serves.
func deadSocket(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func serves(t *testing.T, path string) {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	_ = conn.Close()
}

// A socket file that a crash left behind does not stop the next start (CNI-20,
// MESH-42).
func TestListenReplacesDeadSocket(t *testing.T) {
	cfg := config(t)
	deadSocket(t, cfg.Path)
	l, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	serves(t, cfg.Path)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(cfg.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("socket after Close: %v, want none", err)
	}
}

// A socket that was removed and cannot be made again is told of once, and once more when
// it could.
func TestListenTellsOfLostSocket(t *testing.T) {
	cfg := config(t)
	told := make(chan error, 10)
	cfg.Lost = func(err error) { told <- err }
	l, err := Listen(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(cfg.Path)
	if err := errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := <-told; err == nil {
		t.Error("it is said to be there again")
	}
	time.Sleep(2 * watchInterval) // a second failure is not told
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := <-told; err != nil {
		t.Errorf("told again: %v", err)
	}
	if c, err := net.Dial("unix", cfg.Path); err != nil {
		t.Error(err)
	} else {
		_ = c.Close()
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if len(told) != 0 {
		t.Errorf("told %d times more", len(told))
	}
}

// A socket that somebody removes, alone or with its directory, is served again, its
// lock is held again, and a connection that was there goes on (CNI-20, CNI-21).
func TestListenHeals(t *testing.T) {
	for _, what := range []string{"socket", "directory"} {
		t.Run(what, func(t *testing.T) {
			cfg := config(t)
			l, err := Listen(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			conns := make(chan net.Conn, 100)
			go func() {
				defer close(conns)
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					conns <- c
				}
			}()
			before, err := net.Dial("unix", cfg.Path)
			if err != nil {
				t.Fatal(err)
			}
			served := <-conns
			if what == "socket" {
				err = os.Remove(cfg.Path)
			} else {
				err = os.RemoveAll(filepath.Dir(cfg.Path))
			}
			if err != nil {
				t.Fatal(err)
			}
			deadline := time.Now().Add(10 * time.Second)
			for {
				c, err := net.Dial("unix", cfg.Path)
				if err == nil {
					_ = c.Close()
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("not served again: %v", err)
				}
				time.Sleep(10 * time.Millisecond)
			}
			if _, err := Listen(t.Context(), cfg); !errors.Is(err, ErrInUse) {
				t.Errorf("a second one beside the healed one: %v, want ErrInUse", err)
			}
			if _, err := before.Write([]byte("x")); err != nil {
				t.Errorf("a connection from before: %v", err)
			}
			if n, err := served.Read(make([]byte, 1)); n != 1 || err != nil {
				t.Errorf("a connection from before reads %d, %v", n, err)
			}
			if err := l.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
			for c := range conns {
				_ = c.Close()
			}
			_ = before.Close()
			_ = served.Close()
			if _, err := os.Lstat(cfg.Path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("socket after Close: %v, want none", err)
			}
		})
	}
}

// Only the named users may connect, whatever the socket's mode; of the peer the
// kernel's word counts.
func TestListenUsers(t *testing.T) {
	self := uint32(os.Geteuid())
	for _, tt := range []struct {
		name   string
		users  []uint32
		admits bool
	}{
		{"everybody", nil, true},
		{"self among others", []uint32{self + 1, self}, true},
		{"others", []uint32{self + 1}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := config(t)
			cfg.Users = tt.users
			l, err := Listen(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				c, err := l.Accept()
				if err != nil {
					return
				}
				if p, err := PeerOf(c); err == nil && p == (Peer{PID: int32(os.Getpid()), UID: self}) {
					_, _ = c.Write([]byte("hello"))
				}
				_ = c.Close()
			}()
			c, err := net.Dial("unix", cfg.Path)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			got, _ := io.ReadAll(c)
			if (string(got) == "hello") != tt.admits {
				t.Errorf("read %q, want admission %t", got, tt.admits)
			}
		})
	}
}

// A second process is refused while the first serves, whether the first holds
// the lock or not, and the first goes on serving (CNI-20).
func TestListenRefusesSecond(t *testing.T) {
	t.Run("locked", func(t *testing.T) {
		cfg := config(t)
		first, err := Listen(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer first.Close()
		if _, err := Listen(t.Context(), cfg); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), cfg.Path) {
			t.Errorf("second: %v, want ErrInUse with the path", err)
		}
		serves(t, cfg.Path)
	})
	t.Run("without lock", func(t *testing.T) {
		cfg := config(t)
		if err := os.Mkdir(filepath.Dir(cfg.Path), 0o700); err != nil {
			t.Fatal(err)
		}
		first, err := net.Listen("unix", cfg.Path)
		if err != nil {
			t.Fatal(err)
		}
		defer first.Close()
		if _, err := Listen(t.Context(), cfg); !errors.Is(err, ErrInUse) {
			t.Errorf("second: %v, want ErrInUse", err)
		}
		serves(t, cfg.Path)
	})
	t.Run("after close", func(t *testing.T) {
		cfg := config(t)
		for range 3 {
			l, err := Listen(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// Every refusal names the path and what to do, and harms nothing.
func TestListenRefusals(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	link := filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, []byte("keep"), 0o600), os.Symlink(file, link)); err != nil {
		t.Fatal(err)
	}
	long := filepath.Join(dir, strings.Repeat("x", 120))
	for _, test := range []struct {
		name, path string
		mode       fs.FileMode
		want       string
	}{
		{name: "relative", path: "xds.sock", want: `"xds.sock" is not absolute`},
		{name: "too long", path: long, want: "bytes, 107 are allowed"},
		{name: "regular file", path: file, want: "a file is in the way"},
		{name: "symbolic link", path: link, want: "a symbolic link is in the way"},
		{name: "directory", path: dir, want: "a directory is in the way"},
		{name: "setuid", path: file, mode: fs.ModeSetuid | 0o600, want: "only permission bits"},
		{name: "directory is a file", path: filepath.Join(file, "xds.sock"), want: file},
	} {
		t.Run(test.name, func(t *testing.T) {
			l, err := Listen(t.Context(), Config{Path: test.path, UID: Keep, GID: Keep, Mode: test.mode})
			if err == nil {
				_ = l.Close()
				t.Fatal("no error")
			}
			if !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), test.path) {
				t.Errorf("error %q, want %q and the path", err, test.want)
			}
		})
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "keep" {
		t.Errorf("file in the way: %q, %v", got, err)
	}
}

// Socket and directory get the owner and mode that let their peer in and nobody
// else, whatever the umask is; nobody but us can write to the directory.
func TestListenPermissions(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	const envoy = 65532
	for _, test := range []struct {
		name              string
		uid, gid          int
		mode              fs.FileMode
		socket, directory fs.FileMode
	}{
		{name: "ours", uid: Keep, gid: Keep, mode: 0o600, socket: 0o600, directory: 0o700},
		{name: "by user", uid: envoy, gid: Keep, mode: 0o600, socket: 0o600, directory: 0o701},
		{name: "by group", uid: Keep, gid: envoy, socket: 0o660, directory: 0o750},
		{name: "by both", uid: envoy, gid: envoy, socket: 0o660, directory: 0o751},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := config(t)
			cfg.UID, cfg.GID, cfg.Mode = test.uid, test.gid, test.mode
			l, err := Listen(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			check := func(path string, mode fs.FileMode, uid, gid int) {
				t.Helper()
				info, err := os.Stat(path)
				if err != nil {
					t.Fatal(err)
				}
				owner := info.Sys().(*syscall.Stat_t)
				if info.Mode() != mode || int(owner.Uid) != max(uid, 0) || int(owner.Gid) != max(gid, 0) {
					t.Errorf("%s: %v %d:%d, want %v %d:%d", path, info.Mode(), owner.Uid, owner.Gid, mode, max(uid, 0), max(gid, 0))
				}
			}
			check(cfg.Path, fs.ModeSocket|test.socket, test.uid, test.gid)
			check(filepath.Dir(cfg.Path), fs.ModeDir|test.directory, 0, test.gid)
			check(cfg.Path+".lock", 0o600, 0, 0)
		})
	}
}
