package installer

import (
	"bytes"
	"errors"
	"io"
	"math"
	"os"
	"time"
)

// lateFor is how long a replaced file is looked at. Whoever had it open when it was
// replaced writes into a file that has no name any more; what it wrote must not be
// lost.
const lateFor = 10 * time.Second

// replaced is a foreign file that a configuration of ours took the place of.
type replaced struct {
	name string
	// file was at the name before, and held old; text has been there since.
	file      *os.File
	old, text []byte
	at        time.Time
}

// keepReplaced holds on to the file at path, for the time after it is replaced.
func keepReplaced(path string, t todo, now time.Time) (*replaced, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &replaced{name: t.write, file: f, old: t.old, text: t.text, at: now}, nil
}

func (r *replaced) close() {
	if r != nil {
		_ = r.file.Close() // it was only read
	}
}

// late returns what was written into the file after it was replaced; nil if there
// is nothing, or nothing whole yet.
func (r *replaced) late() ([]byte, error) {
	text, err := io.ReadAll(io.NewSectionReader(r.file, 0, math.MaxInt64))
	if err != nil || bytes.Equal(text, r.old) {
		return nil, err
	}
	if _, err := parseList(text); err != nil {
		return nil, nil //nolint:nilerr // it is not whole, the next look tells
	}
	return text, nil
}

// catchUp puts what somebody wrote too late into the file that is there now, unless
// that was changed since.
func (i *Installer) catchUp() error {
	r := i.replaced
	if r == nil {
		return nil
	}
	text, err := r.late()
	if text == nil && err == nil && i.cfg.Now().Sub(r.at) < lateFor {
		return nil
	}
	i.replaced = nil
	defer r.close()
	if text == nil || err != nil {
		return err
	}
	again, err := Insert(text, i.entry)
	if err != nil {
		return err
	}
	err = i.write(todo{write: r.name, old: r.text, text: again})
	if errors.Is(err, errChanged) {
		return nil // what is there now is newer
	}
	return err
}
