package state

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
)

// The file format of bbolt, version 2: pages of one size, each with a header of 16
// bytes; numbers are in the machine's byte order.
const (
	magic      = 0xED0CDAED
	version    = 2
	headerSize = 16
	// elementSize is that of a branch and of a leaf element alike.
	elementSize = 16
	// bucketSize is the head of a bucket's value: root page and sequence.
	bucketSize = 16
	// metaSize is what a meta page has behind its header, the checksum last.
	metaSize = 64

	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagMeta     = 0x04
	flagFreelist = 0x10
	// leafBucket marks a leaf element whose value is a bucket.
	leafBucket = 0x01
	// noFreelist is the freelist page of a file that does not store one.
	noFreelist = ^uint64(0)
	// manyFree is the count of a freelist page whose true count is its first entry.
	manyFree = 0xFFFF

	minPageSize = 1 << 10
	maxPageSize = 1 << 20
	// maxDepth bounds branches and nested buckets; a file of any size we could
	// write stays far below.
	maxDepth = 64
)

// verify says what is wrong with the bbolt file r of the given size: nil when
// every page that bbolt can come to lies in the file, is of the right kind, is
// used once, and holds elements that lie in it in the order of their keys. torn
// says that one of the two meta pages is not valid, as a crash may leave it.
func verify(r io.ReaderAt, size int64) (torn bool, err error) {
	m, err := newestMeta(r, size)
	if err != nil {
		return false, err
	}
	v := &verifier{r: r, pageSize: int64(m.pageSize), pages: m.pages, used: map[uint64]bool{0: true, 1: true}}
	if have := uint64(size / v.pageSize); m.pages > have {
		return m.torn, fmt.Errorf("cut short: %d pages of %d are there", have, m.pages)
	}
	if m.freelist != noFreelist {
		if err := v.freelist(m.freelist); err != nil {
			return m.torn, err
		}
	}
	return m.torn, v.tree(m.root, 0)
}

// meta is what a meta page says.
type meta struct {
	pageSize              uint32
	root, freelist, pages uint64
	transaction           uint64
	torn                  bool // the other meta page is not valid
}

// newestMeta returns the valid meta page of the higher transaction, as bbolt does:
// one of the two may be torn by a crash.
func newestMeta(r io.ReaderAt, size int64) (meta, error) {
	first, err := readMeta(r, 0)
	second, ok := secondMeta(r, size, first)
	if !ok || err == nil && second.transaction < first.transaction {
		first.torn = !ok
		return first, err
	}
	second.torn = err != nil
	return second, nil
}

// secondMeta returns the other meta page, if it is valid. Without a valid first
// one (zero), the page size is found by trying.
func secondMeta(r io.ReaderAt, size int64, first meta) (meta, bool) {
	for at := int64(minPageSize); at <= maxPageSize && at < size; at *= 2 {
		if first.pageSize != 0 && int64(first.pageSize) != at {
			continue
		}
		if m, err := readMeta(r, at); err == nil && int64(m.pageSize) == at {
			return m, true
		}
	}
	return meta{}, false
}

func readMeta(r io.ReaderAt, at int64) (meta, error) {
	var page [headerSize + metaSize]byte
	if _, err := r.ReadAt(page[:], at); err != nil {
		if errors.Is(err, io.EOF) {
			return meta{}, errors.New("cut short within the first pages")
		}
		return meta{}, fmt.Errorf("read meta page: %w", err)
	}
	order, b := binary.NativeEndian, page[headerSize:]
	sum := fnv.New64a()
	_, _ = sum.Write(b[:metaSize-8])
	m := meta{
		pageSize: order.Uint32(b[8:]), root: order.Uint64(b[16:]), freelist: order.Uint64(b[32:]),
		pages: order.Uint64(b[40:]), transaction: order.Uint64(b[48:]),
	}
	switch {
	case order.Uint32(b) != magic || order.Uint32(b[4:]) != version:
		return meta{}, errors.New("not a bbolt file")
	case order.Uint64(b[metaSize-8:]) != sum.Sum64():
		return meta{}, errors.New("bad checksum of the meta page")
	case order.Uint16(page[8:])&flagMeta == 0, m.pageSize < minPageSize, m.pageSize > maxPageSize, m.pageSize&(m.pageSize-1) != 0:
		return meta{}, errors.New("senseless meta page")
	}
	return m, nil
}

// verifier is one walk through a file.
type verifier struct {
	r        io.ReaderAt
	pageSize int64
	pages    uint64          // how many pages the file has, by its meta page
	used     map[uint64]bool // pages come to so far
}

// page is one page with its overflow.
type page struct {
	id    uint64
	flags uint16
	count int
	data  []byte // the whole page, header included
}

// read reads a page and marks it and its overflow as used.
func (v *verifier) read(id uint64) (page, error) {
	if id < 2 || id >= v.pages {
		return page{}, fmt.Errorf("page %d: there are pages 2 to %d", id, v.pages)
	}
	var header [headerSize]byte
	if _, err := v.r.ReadAt(header[:], int64(id)*v.pageSize); err != nil {
		return page{}, fmt.Errorf("read page %d: %w", id, err)
	}
	order := binary.NativeEndian
	p := page{id: id, flags: order.Uint16(header[8:]), count: int(order.Uint16(header[10:]))}
	overflow := uint64(order.Uint32(header[12:]))
	if own := order.Uint64(header[:]); own != id {
		return page{}, fmt.Errorf("page %d: it says that it is page %d", id, own)
	}
	if overflow >= v.pages-id {
		return page{}, fmt.Errorf("page %d: %d more belong to it, beyond the end", id, overflow)
	}
	for i := id; i <= id+overflow; i++ {
		if v.used[i] {
			return page{}, fmt.Errorf("page %d: used twice", i)
		}
		v.used[i] = true
	}
	p.data = make([]byte, int64(overflow+1)*v.pageSize)
	if _, err := v.r.ReadAt(p.data, int64(id)*v.pageSize); err != nil {
		return page{}, fmt.Errorf("read page %d: %w", id, err)
	}
	return p, nil
}

// freelist walks the list of free pages. A free page that is in use is found by
// the walk of the tree or here, whichever comes second.
func (v *verifier) freelist(id uint64) error {
	p, err := v.read(id)
	if err != nil {
		return err
	}
	if p.flags != flagFreelist {
		return fmt.Errorf("page %d: it is no list of free pages", id)
	}
	entries, count := p.data[headerSize:], uint64(p.count)
	if count == manyFree {
		count = binary.NativeEndian.Uint64(entries)
		entries = entries[8:]
	}
	if count > uint64(len(entries)/8) {
		return fmt.Errorf("page %d: %d free pages do not fit in it", id, count)
	}
	for i := range count {
		free := binary.NativeEndian.Uint64(entries[8*i:])
		if free < 2 || free >= v.pages || v.used[free] {
			return fmt.Errorf("page %d: free page %d is none, or is used", id, free)
		}
		v.used[free] = true
	}
	return nil
}

// tree walks the tree of a bucket from its root page down.
func (v *verifier) tree(id uint64, depth int) error {
	p, err := v.read(id)
	if err != nil {
		return err
	}
	switch {
	case depth > maxDepth:
		return fmt.Errorf("page %d: deeper than %d", id, maxDepth)
	case p.flags == flagLeaf:
		return v.leaf(p, depth)
	case p.flags != flagBranch:
		return fmt.Errorf("page %d: neither branch nor leaf", id)
	case p.count == 0:
		return fmt.Errorf("page %d: a branch without branches", id)
	}
	var before []byte
	for i := range p.count {
		at := headerSize + i*elementSize
		if at+elementSize > len(p.data) {
			return fmt.Errorf("page %d: %d elements do not fit in it", id, p.count)
		}
		e := p.data[at:]
		order := binary.NativeEndian
		key, err := p.slice(at, order.Uint32(e), order.Uint32(e[4:]))
		if err != nil {
			return err
		}
		if i > 0 && bytes.Compare(before, key) >= 0 {
			return fmt.Errorf("page %d: keys out of order", id)
		}
		before = key
		if err := v.tree(order.Uint64(e[8:]), depth+1); err != nil {
			return err
		}
	}
	return nil
}

// leaf looks at the elements of a leaf page, and into the buckets among them.
func (v *verifier) leaf(p page, depth int) error {
	var before []byte
	for i := range p.count {
		at := headerSize + i*elementSize
		if at+elementSize > len(p.data) {
			return fmt.Errorf("page %d: %d elements do not fit in it", p.id, p.count)
		}
		e := p.data[at:]
		order := binary.NativeEndian
		start, keySize, valueSize := order.Uint32(e[4:]), order.Uint32(e[8:]), order.Uint32(e[12:])
		key, err := p.slice(at, start, keySize)
		if err != nil {
			return err
		}
		value, err := p.slice(at+int(keySize), start, valueSize)
		if err != nil {
			return err
		}
		if i > 0 && bytes.Compare(before, key) >= 0 {
			return fmt.Errorf("page %d: keys out of order", p.id)
		}
		before = key
		if order.Uint32(e)&leafBucket == 0 {
			continue
		}
		if err := v.bucket(p.id, value, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// bucket looks at the value of a leaf element that is a bucket: it has a root page,
// or the one leaf page of a small bucket within it.
func (v *verifier) bucket(id uint64, value []byte, depth int) error {
	if len(value) < bucketSize {
		return fmt.Errorf("page %d: a bucket of %d bytes", id, len(value))
	}
	order := binary.NativeEndian
	if root := order.Uint64(value); root != 0 {
		return v.tree(root, depth)
	}
	inline := value[bucketSize:]
	if len(inline) < headerSize || order.Uint16(inline[8:]) != flagLeaf {
		return fmt.Errorf("page %d: a small bucket without its page", id)
	}
	return v.leaf(page{id: id, count: int(order.Uint16(inline[10:])), data: inline}, depth)
}

// slice returns size bytes of the page that start at offset from the element at.
func (p page) slice(at int, offset, size uint32) ([]byte, error) {
	start := int64(at) + int64(offset)
	if start+int64(size) > int64(len(p.data)) {
		return nil, fmt.Errorf("page %d: an element lies beyond its end", p.id)
	}
	return p.data[start : start+int64(size)], nil
}
