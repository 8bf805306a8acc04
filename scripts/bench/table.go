package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
)

// figure is one row of the table.
type figure struct {
	// ok says that the aim is met.
	ok bool
	// what was measured.
	what string
	// measured is the figure, relative where there is something to compare with, and
	// the absolute values beside.
	measured string
	// compared is what it was compared with, in the same run; may be empty.
	compared string
	aim      string
}

func (f figure) verdict() string {
	if f.ok {
		return "ok"
	}
	return "MISS"
}

// print writes the row as a line.
func (f figure) print(w io.Writer) {
	compared := f.compared
	if compared != "" {
		compared = "; compared with " + compared
	}
	fmt.Fprintf(w, "%-4s %s: %s%s; aim %s\n", f.verdict(), f.what, f.measured, compared, f.aim)
}

// The lines of README.md between which the table is.
const (
	tableBegin = "<!-- make bench README=1 writes from here -->"
	tableEnd   = "<!-- to here -->"
)

// markdown is the table for README.md.
func markdown(figures []figure, environment string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n| | what | measured | compared with, same run | aim |\n|---|---|---|---|---|\n", environment)
	for _, f := range figures {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", f.verdict(), f.what, f.measured, f.compared, f.aim)
	}
	return b.String()
}

// writeTable puts the table into the file at path.
func writeTable(path, table string) error {
	old, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	before, rest, found := bytes.Cut(old, []byte(tableBegin+"\n"))
	_, after, foundEnd := bytes.Cut(rest, []byte(tableEnd))
	if !found || !foundEnd {
		return fmt.Errorf("%s: the lines %q and %q are missing: put them where the table belongs", path, tableBegin, tableEnd)
	}
	text := fmt.Sprintf("%s%s\n%s%s%s", before, tableBegin, table, tableEnd, after)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}
