package installer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// sourceKey is the key of an owned list that names the file it was made from.
// Runtimes ignore keys that they do not know.
const sourceKey = "portolan.aether.io/source"

// errAlone is a list without a plugin that could come before ours.
var errAlone = errors.New("it has no plugin but ours: put the plugin that gives the address before it")

// span is the place of one plugin's entry in the text of a list.
type span struct {
	start, end int
	ours       bool
}

// conflist is the text of a network configuration list with the places of its
// entries. Edits splice the text, so that everything of others keeps its bytes.
type conflist struct {
	text    []byte
	plugins []span
}

// parseList finds the entries of a list. Of a key that is there twice the last
// counts, as it does for runtimes.
func parseList(text []byte) (conflist, error) {
	l := conflist{text: text}
	if !json.Valid(text) {
		var v any
		return l, json.Unmarshal(text, &v) // says what is wrong and where
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	if open, err := dec.Token(); err != nil || open != json.Delim('{') {
		return l, errors.Join(errors.New("it is no JSON object"), err)
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return l, err
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return l, err
		}
		if key != "plugins" {
			continue
		}
		if l.plugins, err = entries(value, int(dec.InputOffset())-len(value)); err != nil {
			return l, err
		}
	}
	if len(l.plugins) == 0 {
		return l, errors.New(`it has no entries in "plugins"`)
	}
	return l, nil
}

// entries returns the places of the elements of a JSON array that begins at base.
func entries(array json.RawMessage, base int) ([]span, error) {
	dec := json.NewDecoder(bytes.NewReader(array))
	dec.UseNumber()
	open, err := dec.Token()
	if err != nil {
		return nil, err
	}
	if open != json.Delim('[') {
		return nil, nil // a later key may still hold the list
	}
	var out []span
	for dec.More() {
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, err
		}
		end := int(dec.InputOffset())
		out = append(out, span{start: base + end - len(raw), end: base + end, ours: isOurs(raw)})
	}
	return out, nil
}

// chained reports whether our entry follows another plugin's.
func (l conflist) chained() bool {
	return slices.IndexFunc(l.plugins, func(s span) bool { return !s.ours }) == 0 &&
		slices.ContainsFunc(l.plugins, func(s span) bool { return s.ours })
}

// Insert returns the list with entry exactly once and after another plugin. An
// entry of ours that is already in such a place keeps it, so that whoever chains
// behind us is not pushed about; a list that is right already is returned as it is.
func Insert(text, entry []byte) ([]byte, error) {
	l, err := parseList(text)
	if err != nil {
		return nil, err
	}
	first := slices.IndexFunc(l.plugins, func(s span) bool { return !s.ours })
	if first < 0 {
		return nil, errAlone
	}
	keep := -1
	for i, s := range l.plugins {
		if s.ours && i > first {
			keep = i
			break
		}
	}
	var edits []edit
	for i, s := range l.plugins {
		if s.ours && i != keep {
			edits = append(edits, l.cut(i, first))
		}
	}
	switch {
	case keep < 0:
		last := l.plugins[len(l.plugins)-1].end
		edits = append(edits, edit{start: last, end: last, text: append(l.separator(), entry...)})
	case !equal(text[l.plugins[keep].start:l.plugins[keep].end], entry):
		edits = append(edits, edit{start: l.plugins[keep].start, end: l.plugins[keep].end, text: entry})
	}
	return apply(text, edits), nil
}

// Remove returns the list without our entries; the same text when there are none.
// Remove(Insert(x)) is x, byte for byte.
func Remove(text []byte) ([]byte, error) {
	l, err := parseList(text)
	if err != nil {
		return nil, err
	}
	first := slices.IndexFunc(l.plugins, func(s span) bool { return !s.ours })
	if first < 0 {
		return nil, errAlone
	}
	var edits []edit
	for i, s := range l.plugins {
		if s.ours {
			edits = append(edits, l.cut(i, first))
		}
	}
	return apply(text, edits), nil
}

// cut takes entry i out together with the separator that leads to the entry that
// stays, which is behind it for those before the first.
func (l conflist) cut(i, first int) edit {
	if i < first {
		return edit{start: l.plugins[i].start, end: l.plugins[i+1].start}
	}
	return edit{start: l.plugins[i-1].end, end: l.plugins[i].end}
}

// separator is what goes between the last entry and a new one: as between the two
// entries before, or the comma and the white space that the first one has.
func (l conflist) separator() []byte {
	last := len(l.plugins) - 1
	if last > 0 {
		return bytes.Clone(l.text[l.plugins[last-1].end:l.plugins[last].start])
	}
	before := l.text[:l.plugins[0].start]
	space := before[len(bytes.TrimRight(before, " \t\r\n")):]
	return append([]byte{','}, space...)
}

// edit replaces a part of a text.
type edit struct {
	start, end int
	text       []byte
}

// apply makes edits that do not overlap.
func apply(text []byte, edits []edit) []byte {
	slices.SortFunc(edits, func(a, b edit) int { return a.start - b.start })
	var out []byte
	at := 0
	for _, e := range edits {
		out = append(append(out, text[at:e.start]...), e.text...)
		at = e.end
	}
	return append(out, text[at:]...)
}

// equal compares two JSON values by what they mean.
func equal(a, b []byte) bool {
	ca, errA := canonical(a)
	cb, errB := canonical(b)
	return errA == nil && errB == nil && bytes.Equal(ca, cb)
}

// canonical is a JSON value with sorted keys, without white space, and with
// numbers as they were written.
func canonical(text []byte) ([]byte, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, err
	}
	return json.Marshal(v)
}

// ownedList returns the owned list that stands for a foreign file: the same
// network with our entry behind it. A single configuration becomes the one plugin
// of a list with its name and version (CNI-8).
func ownedList(f confFile, entry []byte) ([]byte, error) {
	name, err := json.Marshal(f.name)
	if err != nil {
		return nil, err
	}
	if f.list {
		text, err := Insert(f.text, entry)
		if err != nil {
			return nil, err
		}
		at := bytes.IndexByte(text, '{') + 1
		return apply(text, []edit{{start: at, end: at, text: fmt.Appendf(nil, `%q:%s,`, sourceKey, name)}}), nil
	}
	version, err := json.Marshal(f.version)
	if err != nil {
		return nil, err
	}
	network, err := json.Marshal(f.network)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "{\n  %q: %s,\n  \"cniVersion\": %s,\n  \"name\": %s,\n  \"plugins\": [\n    %s,\n    %s\n  ]\n}\n",
		sourceKey, name, version, network, bytes.TrimSpace(f.text), entry), nil
}

// isOwned reports whether a text is an owned list.
func isOwned(text []byte) bool {
	var fields map[string]json.RawMessage
	if json.Unmarshal(text, &fields) != nil {
		return false
	}
	_, ok := fields[sourceKey]
	return ok
}
