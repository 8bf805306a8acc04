package identity

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
)

// durability says whether a write must survive a power cut.
type durability bool

const (
	// durable writes reach the disk before they return.
	durable durability = true
	// volatile writes are atomic, but may be lost or empty after a power cut: for
	// what can be made again.
	volatile durability = false
)

const (
	privateDirMode  = 0o700
	privateFileMode = 0o600
	// temporaryMark is in the name of every file that a crash may leave behind.
	temporaryMark = ".tmp-"
)

// writeFile replaces path by data, mode 0600: a reader sees the old bytes or the
// new ones, never a part.
func writeFile(path string, data []byte, d durability) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+temporaryMark+"*") // 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	if err == nil && d == durable {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	if d == durable {
		return syncDir(filepath.Dir(path))
	}
	return nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// removeTemporary removes what a crash during writeFile(path) left.
func removeTemporary(path string) error {
	left, err := filepath.Glob(path + temporaryMark + "*")
	if err != nil {
		return fmt.Errorf("look for leftovers of %s: %w", path, err)
	}
	for _, p := range left {
		if err := os.Remove(p); err != nil {
			return fmt.Errorf("remove leftover: %w", err)
		}
	}
	return nil
}

// ensurePrivateDir makes dir and takes the rights of others on it away.
func ensurePrivateDir(dir string, log *slog.Logger) error {
	if err := os.MkdirAll(dir, privateDirMode); err != nil {
		return fmt.Errorf("make the folder of keys: %w", err)
	}
	return restrict(dir, privateDirMode, log)
}

// ensurePrivateFile takes the rights of others on path away.
func ensurePrivateFile(path string, log *slog.Logger) error {
	return restrict(path, privateFileMode, log)
}

func restrict(path string, mode os.FileMode, log *slog.Logger) error {
	st, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("check who may read keys: %w", err)
	}
	if st.Mode().Perm()&^mode == 0 {
		return nil
	}
	if err := os.Chmod(path, mode); err != nil {
		return fmt.Errorf("%s holds keys and others may read it (mode %v): %w", path, st.Mode().Perm(), err)
	}
	log.Warn("keys could be read by others; mode corrected", "path", path, "was", st.Mode().Perm().String(), "now", mode.String())
	return nil
}
