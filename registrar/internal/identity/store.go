package identity

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Store keeps SVIDs over a restart. What it holds can always be made again, so it
// may lose an entry, but never return half of one. The Manager calls it from one
// goroutine at a time.
type Store interface {
	// Get returns what was put under key, or nil when there is nothing.
	Get(key string) ([]byte, error)
	// Put replaces what is under key.
	Put(key string, value []byte) error
	// Delete removes key; a key that is not there is no error.
	Delete(key string) error
	// Where names the place of key in messages.
	Where(key string) string
}

// storeKey is a name of fixed length, as identities may be longer than file names
// can be.
func storeKey(id model.Identity) string {
	sum := sha256.Sum256([]byte(id.SPIFFE()))
	return hex.EncodeToString(sum[:16])
}

// fileSuffix of the files of a FileStore.
const fileSuffix = ".pem"

// FileStore is a Store of one file per entry, mode 0600. Writes are atomic but not
// flushed: a power cut costs a new certificate, not 10,000 flushes of the disk.
type FileStore struct{ dir string }

// OpenFileStore opens or makes the folder dir and removes what no certificate can
// need any more: leftovers of a crash and files older than an SVID lives.
func OpenFileStore(dir string, clock Clock, log *slog.Logger) (*FileStore, error) {
	if err := ensurePrivateDir(dir, log); err != nil {
		return nil, err
	}
	list, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list stored certificates: %w", err)
	}
	oldest := clock().Add(-MaxLifetime)
	for _, e := range list {
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list stored certificates: %w", err)
		}
		if strings.Contains(e.Name(), temporaryMark) || info.ModTime().Before(oldest) {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return nil, fmt.Errorf("remove an old certificate: %w", err)
			}
		}
	}
	return &FileStore{dir: dir}, nil
}

// Where implements Store: the path of the file.
func (s *FileStore) Where(key string) string { return filepath.Join(s.dir, key+fileSuffix) }

// Get implements Store.
func (s *FileStore) Get(key string) ([]byte, error) {
	data, err := os.ReadFile(s.Where(key))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return data, err
}

// Put implements Store.
func (s *FileStore) Put(key string, value []byte) error {
	return writeFile(s.Where(key), value, volatile)
}

// Delete implements Store.
func (s *FileStore) Delete(key string) error {
	if err := os.Remove(s.Where(key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

var _ Store = (*FileStore)(nil)
