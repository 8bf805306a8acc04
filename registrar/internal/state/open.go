package state

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
)

const (
	fileMode = 0o600
	dirMode  = 0o700
	// othersWrite are the bits of a folder in which others can replace files.
	othersWrite = 0o022
	// lockTimeout is how long a registrar waits for the one that it replaces.
	lockTimeout = time.Second
	lockRetry   = 20 * time.Millisecond
	// keptAside is how many damaged files stay, the newest ones: a file that is
	// damaged at every start must not fill the disk.
	keptAside = 3
	// attempts bounds opening: one for the damaged file, one for the fresh one, and
	// some for a file that another process moves away meanwhile.
	attempts = 5
)

// asideMark is what the name of a damaged file has, before the time.
const asideMark = ".corrupt-"

// ErrLocked says that another process has the file open.
var ErrLocked = errors.New("another registrar holds it; stop that one, or give this one a state file of its own")

// Recovery says what Open had to give up. The zero value is a file that was fine,
// or that was not there.
type Recovery struct {
	// SetAside is the path to which the damaged file was renamed; empty when there
	// was nothing to keep.
	SetAside string
	// Reason says what was wrong with the file.
	Reason string
}

// Open opens the state file at path, which only one process can at a time, and
// makes it with its folder when it is missing (mode 0600 in 0700). A file that is
// damaged is renamed to path.corrupt-<time in UTC>, and a fresh one is opened. The
// error names the path and the remedy; the caller closes the DB.
func Open(path string, log *slog.Logger) (*bbolt.DB, Recovery, error) {
	return opener{path: path, log: log, now: time.Now, lockTimeout: lockTimeout}.open()
}

// batchDelay is how long a write waits for others that could share its flush. An
// ADD waits for it, so it is short beside a flush.
const batchDelay = time.Millisecond

// opener is one Open.
type opener struct {
	path        string
	log         *slog.Logger
	now         func() time.Time // for the names of what is set aside
	lockTimeout time.Duration
}

// damagedError says that the file was damaged and has been set aside.
type damagedError struct{ Recovery }

func (e *damagedError) Error() string { return e.Reason }

// errMoved says that the file was renamed between opening and locking it.
var errMoved = errors.New("the file was moved while it was opened")

func (o opener) open() (*bbolt.DB, Recovery, error) {
	if err := o.prepareFolder(); err != nil {
		return nil, Recovery{}, explain(o.path, err)
	}
	var recovery Recovery
	err := errMoved
	for range attempts {
		var db *bbolt.DB
		db, err = o.try(&recovery)
		var damaged *damagedError
		switch {
		case err == nil:
			db.MaxBatchDelay = batchDelay
			return db, recovery, nil
		case errors.As(err, &damaged):
			recovery = damaged.Recovery
			o.log.Error("state file is damaged; it was set aside and a fresh one is used",
				"path", o.path, "setAside", recovery.SetAside, "reason", recovery.Reason)
		case !errors.Is(err, errMoved):
			return nil, recovery, explain(o.path, err)
		}
	}
	return nil, recovery, explain(o.path, err)
}

// prepareFolder makes the folder, and says so when others can put files into it.
// That they can look into it, as into one that a kubelet made, shows them names.
func (o opener) prepareFolder() error {
	dir := filepath.Dir(o.path)
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return err
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if mode := info.Mode().Perm(); mode&othersWrite != 0 {
		o.log.Warn("others can write into the folder of the state file; chmod 0700 it", "folder", dir, "mode", fmt.Sprintf("%#o", mode))
	}
	return nil
}

// try opens the file once. A damaged one has been set aside when it returns.
func (o opener) try(recovery *Recovery) (*bbolt.DB, error) {
	var file *os.File // locked and verified
	var found contents
	db, err := guarded(func() (*bbolt.DB, error) {
		return bbolt.Open(o.path, fileMode, &bbolt.Options{
			Timeout: o.lockTimeout,
			OpenFile: func(name string, flag int, mode os.FileMode) (*os.File, error) {
				f, c, err := o.lock(name, flag, mode, recovery)
				if err != nil {
					return nil, err
				}
				file, found = f, c
				return f, nil
			},
		})
	})
	switch {
	case err == nil:
	case file == nil: // refused by lock
		return nil, err
	case isDamage(err):
		// The lock is still held if bbolt panicked; if not, nobody else takes a
		// damaged file either.
		err = o.setAside(err)
		_ = file.Close()
		return nil, err
	case found.size == 0:
		// Half of a fresh file would count as damaged the next time.
		_ = os.Remove(o.path)
		return nil, err
	default:
		return nil, err
	}
	if _, err := guarded(func() (*bbolt.DB, error) { return db, check(db, found.torn) }); err != nil {
		err = o.setAside(err)
		_ = db.Close()
		return nil, err
	}
	return db, nil
}

// contents is what was found in a file.
type contents struct {
	size int64
	torn bool // one meta page is not valid
}

// lock opens, locks and verifies the file. A damaged file is set aside while the
// lock is held, so that of two registrars that start at once none renames the
// other's fresh file.
func (o opener) lock(name string, flag int, mode os.FileMode, recovery *Recovery) (*os.File, contents, error) {
	_, statErr := os.Lstat(name)
	f, err := os.OpenFile(name, flag, mode)
	if err != nil {
		return nil, contents{}, err
	}
	var found contents
	found.size, err = o.lockedSize(f, name)
	if err == nil && found.size > 0 {
		var damage error
		if found.torn, damage = verify(f, found.size); damage != nil {
			err = o.setAside(damage)
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, contents{}, err
	}
	if found.size == 0 && statErr == nil {
		recovery.Reason = "the file was empty"
		o.log.Warn("state file is empty; a fresh one is made of it", "path", o.path)
	}
	return f, found, nil
}

// lockedSize locks f and returns its size, once it is sure that f is still the
// file of this name, a regular one, and closed to others.
func (o opener) lockedSize(f *os.File, name string) (int64, error) {
	for waited := time.Duration(0); ; waited += lockRetry {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return 0, fmt.Errorf("lock: %w", err)
		}
		if waited >= o.lockTimeout {
			return 0, ErrLocked
		}
		time.Sleep(lockRetry)
	}
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if named, err := os.Stat(name); err != nil || !os.SameFile(info, named) {
		return 0, errMoved
	}
	if !info.Mode().IsRegular() {
		return 0, errors.New("it is no regular file; choose another path")
	}
	if info.Mode().Perm()&^fileMode != 0 {
		if err := f.Chmod(fileMode); err != nil {
			return 0, err
		}
	}
	return info.Size(), nil
}

// setAside renames the damaged file; the error says where to, or why it cannot.
func (o opener) setAside(damage error) error {
	stamp := o.path + asideMark + o.now().UTC().Format("20060102T150405Z")
	aside := stamp
	for n := 2; ; n++ {
		if _, err := os.Lstat(aside); errors.Is(err, fs.ErrNotExist) {
			break
		}
		aside = fmt.Sprintf("%s-%d", stamp, n)
	}
	if err := os.Rename(o.path, aside); err != nil {
		return fmt.Errorf("it is damaged (%w) and cannot be set aside: %w", damage, err)
	}
	o.prune()
	return &damagedError{Recovery{SetAside: aside, Reason: damage.Error()}}
}

// prune removes the oldest of the files that were set aside.
func (o opener) prune() {
	aside, err := filepath.Glob(o.path + asideMark + "*")
	if err != nil { // the path has a bracket, say
		return
	}
	slices.Sort(aside) // their names begin with the time
	for _, old := range aside[:max(0, len(aside)-keptAside)] {
		if err := os.Remove(old); err != nil {
			o.log.Warn("an old damaged state file stays; remove it", "path", old, "error", err)
			continue
		}
		o.log.Info("removed an old damaged state file; newer ones stay", "path", old)
	}
}

// guarded calls fn and makes an error of its panic.
func guarded(fn func() (*bbolt.DB, error)) (db *bbolt.DB, err error) {
	defer func() {
		if r := recover(); r != nil {
			db, err = nil, &panicError{value: r}
		}
	}()
	return fn()
}

// panicError is a panic of bbolt over the contents of a file.
type panicError struct{ value any }

func (e *panicError) Error() string { return fmt.Sprintf("bbolt: %v", e.value) }

// check returns the first thing that bbolt's own check finds.
func check(db *bbolt.DB, torn bool) error {
	if torn {
		// Any commit writes the meta page that is not valid anew. Without that the
		// check would refuse a file that is good.
		if err := db.Update(func(*bbolt.Tx) error { return nil }); err != nil {
			return nil //nolint:nilerr // no space, say: verify has found the file good
		}
	}
	return db.View(func(tx *bbolt.Tx) error {
		var first error
		for err := range tx.Check() { // to the end: the channel must be drained
			if first == nil {
				first = err
			}
		}
		return first
	})
}

// isDamage says whether err of bbolt.Open is about the contents of the file.
func isDamage(err error) bool {
	var panicked *panicError
	return errors.As(err, &panicked) || errors.Is(err, bbolterrors.ErrInvalid) ||
		errors.Is(err, bbolterrors.ErrVersionMismatch) || errors.Is(err, bbolterrors.ErrChecksum)
}

// explain adds the path and, where there is one, the remedy.
func explain(path string, err error) error {
	if errors.Is(err, bbolterrors.ErrTimeout) {
		err = ErrLocked
	}
	return fmt.Errorf("open state file %s: %w", path, remedy(path, err))
}

// remedy adds to what the disk says what is to be done about it.
func remedy(path string, err error) error {
	dir := filepath.Dir(path)
	switch {
	case errors.Is(err, syscall.EROFS), errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w; make %s writable or choose another path", err, dir)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w; free space on the file system of %s", err, dir)
	}
	return err
}
