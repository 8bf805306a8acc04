package installer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// markerName is the file that names the instance that writes here. Whoever
	// changes a configuration holds its lock.
	markerName = ".portolan-installer"
	// maxMarker bounds what is read of a marker.
	maxMarker = 256
	// lockTimeout bounds the wait for another instance's change, which takes
	// milliseconds; lockRetry is how often it is tried.
	lockTimeout = 2 * time.Second
	lockRetry   = 10 * time.Millisecond
)

// marker is the locked marker of a configuration folder.
type marker struct {
	file *os.File
	// owner is the instance that wrote last, "" when there was none.
	owner string
}

// lockMarker locks the marker of dir, and makes it if need be.
func lockMarker(ctx context.Context, dir string) (*marker, error) {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	path := filepath.Join(dir, markerName)
	for {
		m, err := tryMarker(path)
		if m != nil || err != nil {
			return m, err
		}
		t := time.NewTimer(lockRetry)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("another process holds the lock of %s: end it: %w", path, ctx.Err())
		case <-t.C:
		}
	}
}

// tryMarker returns nil and no error when somebody else has the lock, or has just
// removed the file.
func tryMarker(path string) (*marker, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		mine, errMine := f.Stat()
		there, errThere := os.Lstat(path)
		if errThere == nil && errMine == nil && os.SameFile(mine, there) {
			owner, err := io.ReadAll(io.LimitReader(f, maxMarker))
			if err != nil {
				return nil, errors.Join(fmt.Errorf("read %s: %w", path, err), f.Close())
			}
			return &marker{file: f, owner: string(owner)}, nil
		}
	} else if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return nil, f.Close()
}

// claim makes id the owner. The marker is written in place: it is a lock, and no
// runtime reads it.
func (m *marker) claim(id string) error {
	if m.owner == id {
		return nil
	}
	if err := m.file.Truncate(0); err != nil {
		return err
	}
	if _, err := m.file.WriteAt([]byte(id), 0); err != nil {
		return err
	}
	m.owner = id
	return m.file.Sync()
}

// remove removes the marker; it stays locked until unlock.
func (m *marker) remove() error {
	if err := os.Remove(m.file.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// unlock gives the lock back.
func (m *marker) unlock() { _ = m.file.Close() }
