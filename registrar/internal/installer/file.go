package installer

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// tempPattern names unfinished files: in the same folder, so that the rename is
// atomic and runtimes notice it, and with an extension that none of them loads.
const tempPattern = ".portolan-*.tmp"

// errChanged is a file that somebody else changed while it was being replaced.
var errChanged = errors.New("it changed meanwhile")

// replace makes path hold what fill writes, with the mode and, if like is not nil,
// its owner. Readers see the old file or the new one. Just before the change ready
// is asked; its error leaves everything as it was. After a power cut one of the two
// is there.
func replace(path string, mode fs.FileMode, like fs.FileInfo, fill func(io.Writer) error, ready func() error) (err error) {
	dir := filepath.Dir(path)
	temp, err := os.CreateTemp(dir, tempPattern)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(temp.Name())
		}
	}()
	err = fill(temp)
	if err == nil && like != nil {
		if st, ok := like.Sys().(*syscall.Stat_t); ok {
			err = temp.Chown(int(st.Uid), int(st.Gid))
		}
	}
	if err == nil {
		err = temp.Chmod(mode)
	}
	if err == nil {
		err = temp.Sync()
	}
	if err = errors.Join(err, temp.Close()); err != nil {
		return err
	}
	if err := ready(); err != nil {
		return err
	}
	if err := os.Rename(temp.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// syncDir makes the names in a folder survive a power cut.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// replaceConf replaces the configuration at path, which held old (nil: there was
// none), by text. When it holds something else by now, nothing is changed and the
// error is errChanged.
func replaceConf(path string, old, text []byte) error {
	mode := fs.FileMode(0o644)
	info, err := os.Lstat(path)
	switch {
	case err == nil:
		mode = info.Mode().Perm()
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	fill := func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	}
	return replace(path, mode, info, fill, func() error { return unchanged(path, old) })
}

// unchanged fails unless path holds old, nil for no file.
func unchanged(path string, old []byte) error {
	now, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && old == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return errChanged
	case err != nil:
		return err
	case old == nil || !bytes.Equal(now, old):
		return errChanged
	}
	return nil
}

// binaryMode is the mode of the plugin's binary.
const binaryMode fs.FileMode = 0o755

// copyBinary makes target an executable copy of source and reports whether it had
// to. A target that is the source itself is left alone.
func copyBinary(source, target string) (bool, error) {
	src, err := os.Open(source)
	if err != nil {
		return false, fmt.Errorf("plugin to install: %w", err)
	}
	defer src.Close()
	info, err := src.Stat()
	if err != nil {
		return false, fmt.Errorf("plugin to install: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() == 0 {
		return false, fmt.Errorf("plugin to install: %s is no program: give the path of the portolan binary", source)
	}
	if now, err := os.Lstat(target); err == nil && now.Mode().IsRegular() && now.Size() == info.Size() {
		same, err := sameContent(src, target)
		if err != nil {
			return false, err
		}
		if os.SameFile(info, now) || same && now.Mode().Perm() == binaryMode {
			return false, nil
		}
		if _, err := src.Seek(0, io.SeekStart); err != nil {
			return false, err
		}
	}
	fill := func(w io.Writer) error {
		_, err := io.Copy(w, src)
		return err
	}
	err = replace(target, binaryMode, nil, fill, func() error { return nil })
	return err == nil, err
}

// sameContent compares a file, from its beginning, with the one at path.
func sameContent(f io.Reader, path string) (bool, error) {
	other, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer other.Close()
	const block = 64 << 10
	a, b := make([]byte, block), make([]byte, block)
	for {
		n, errA := io.ReadFull(f, a)
		m, errB := io.ReadFull(other, b)
		if !bytes.Equal(a[:n], b[:m]) {
			return false, nil
		}
		if errA != nil || errB != nil {
			return ended(errA) && ended(errB), nil
		}
	}
}

func ended(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }

// removeTemporary removes what a crash left unfinished in dir.
func removeTemporary(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, tempPattern))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range left {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
