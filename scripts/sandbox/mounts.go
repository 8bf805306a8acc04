package sandbox

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// private are the folders of /var/lib that a sandbox has to itself: the state
// of the registrar, and of the reference CNI plugins and libcni.
func private() []string { return []string{"portolan", "cni"} }

// sharedMounts are the folders whose mounts are seen by mount namespaces made
// later, as on a node (contract 4.1).
func sharedMounts() []string { return []string{"/run/netns", "/run/portolan/netns"} }

// setUp makes the sandbox a node. It runs as process 1, before anything else.
func setUp() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	resolvConf, err := resolvConfPath()
	if err != nil {
		return err
	}
	if err := shadow("/var/lib", private()); err != nil {
		return err
	}
	if err := mountTmpfs("/run"); err != nil {
		return err
	}
	for _, dir := range sharedMounts() {
		if err := makeShared(dir); err != nil {
			return err
		}
	}
	if err := ownResolvConf(resolvConf); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(Hostname)); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// mountTmpfs mounts an empty file system in memory.
func mountTmpfs(dir string) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount a tmpfs at %s: %w", dir, err)
	}
	return nil
}

// shadow gives the sandbox empty folders dir/names without making them on the
// machine's disk: dir becomes a tmpfs, into which every other entry of the old
// dir is bound.
func shadow(dir string, names []string) error {
	// The old folder stays reachable through this descriptor's path.
	old, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", dir, err)
	}
	defer unix.Close(old)
	oldPath := fmt.Sprintf("/proc/self/fd/%d", old)
	entries, err := os.ReadDir(oldPath)
	if err != nil {
		return fmt.Errorf("read %s: %w", dir, err)
	}
	if err := mountTmpfs(dir); err != nil {
		return err
	}
	for _, name := range names {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			return fmt.Errorf("make %s: %w", filepath.Join(dir, name), err)
		}
	}
	for _, entry := range entries {
		if _, err := os.Lstat(filepath.Join(dir, entry.Name())); err == nil {
			continue
		}
		if err := bindEntry(oldPath, dir, entry); err != nil {
			return err
		}
	}
	return nil
}

// bindEntry makes one entry of oldDir visible in dir.
func bindEntry(oldDir, dir string, entry fs.DirEntry) error {
	from, to := filepath.Join(oldDir, entry.Name()), filepath.Join(dir, entry.Name())
	switch {
	case entry.IsDir():
		if err := os.Mkdir(to, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", to, err)
		}
	case entry.Type() == fs.ModeSymlink:
		target, err := os.Readlink(from)
		if err != nil {
			return fmt.Errorf("read %s: %w", to, err)
		}
		if err := os.Symlink(target, to); err != nil {
			return fmt.Errorf("make %s: %w", to, err)
		}
		return nil
	default:
		if err := os.WriteFile(to, nil, 0o644); err != nil {
			return fmt.Errorf("make %s: %w", to, err)
		}
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s: %w", to, err)
	}
	return nil
}

// makeShared makes dir a mount whose later mounts spread to mount namespaces
// that are made from this one.
func makeShared(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", dir, err)
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", dir, err)
	}
	if err := unix.Mount("", dir, "", unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share %s: %w", dir, err)
	}
	return nil
}

// ResolvConf is where the resolver's configuration is, inside too.
const ResolvConf = "/etc/resolv.conf"

// resolvConfPath is the file that ResolvConf leads to: itself, or the target of
// a link, which need not exist.
func resolvConfPath() (string, error) {
	info, err := os.Lstat(ResolvConf)
	if err != nil {
		return "", fmt.Errorf("%w: make an empty one", err)
	}
	if info.Mode().Type() != fs.ModeSymlink {
		return ResolvConf, nil
	}
	target, err := os.Readlink(ResolvConf)
	if err != nil {
		return "", fmt.Errorf("read the link: %w", err)
	}
	if filepath.IsAbs(target) {
		return filepath.Clean(target), nil
	}
	return filepath.Join(filepath.Dir(ResolvConf), target), nil
}

// ownResolvConf puts an empty file of the sandbox's at path, which may have
// gone with the machine's /run.
func ownResolvConf(path string) error {
	const own = "/run/resolv.conf"
	if err := os.WriteFile(own, nil, 0o644); err != nil {
		return fmt.Errorf("make %s: %w", own, err)
	}
	if strings.HasPrefix(path, "/run/") {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("make %s: %w", filepath.Dir(path), err)
		}
		if path == own {
			return nil
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			return fmt.Errorf("make %s: %w", path, err)
		}
	}
	if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", path, err)
	}
	return nil
}
