package table

// maxWireName is the longest name on the wire, with its lengths and root (RFC 1035, 2.3.4).
const maxWireName = 255

// wireName returns the wire form of a host name without trailing dot: each label
// behind its length, without the root. In this form a dot inside a label cannot
// be taken for one between labels.
func wireName(name string) string {
	if name == "" {
		return ""
	}
	out := make([]byte, 1, len(name)+1)
	start := 0
	for i := range len(name) {
		if name[i] == '.' {
			out[start] = byte(len(out) - start - 1)
			start = len(out)
			out = append(out, 0)
			continue
		}
		out = append(out, name[i])
	}
	out[start] = byte(len(out) - start - 1)
	return string(out)
}

// QueryName is the name of a question as Table looks it up: wire form, lower
// case, without the root. The zero value is the root.
type QueryName struct {
	buf [maxWireName]byte
	n   int
}

// Parse reads the name at the start of the question in msg, which is the whole
// message, and returns the offset behind it. False for a name that ends too
// early, is too long, or is compressed: nothing before a question can be pointed
// to.
func (q *QueryName) Parse(msg []byte, off int) (int, bool) {
	q.n = 0
	for off < len(msg) {
		length := int(msg[off])
		if length == 0 {
			return off + 1, true
		}
		// The root needs one byte more.
		if length > 63 || off+1+length > len(msg) || q.n+1+length > maxWireName-1 {
			return 0, false
		}
		q.buf[q.n] = byte(length)
		for i := range length {
			c := msg[off+1+i]
			if 'A' <= c && c <= 'Z' {
				c += 'a' - 'A'
			}
			q.buf[q.n+1+i] = c
		}
		q.n += 1 + length
		off += 1 + length
	}
	return 0, false
}

// Bytes returns the name; valid until the next Parse.
func (q *QueryName) Bytes() []byte { return q.buf[:q.n] }

// parents calls yield with every name above name, the nearest first and the
// root last, until it returns false. Names are in wire form.
func parents(name string, yield func(parent string) bool) {
	for name != "" {
		name = name[1+int(name[0]):]
		if !yield(name) {
			return
		}
	}
}
