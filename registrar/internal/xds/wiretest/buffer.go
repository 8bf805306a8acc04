package wiretest

import "sync"

// limitedBuffer keeps the first 256 KiB written to it, from any goroutine.
type limitedBuffer struct {
	mu   sync.Mutex
	data []byte
}

// Write never fails; what is too much is dropped.
func (b *limitedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.data = append(b.data, p[:min(len(p), 256<<10-len(b.data))]...)
	return len(p), nil
}

// String returns what was kept.
func (b *limitedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(b.data)
}
