package measure

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Figure is one row of the table.
type Figure struct {
	// OK says that the aim is met.
	OK bool
	// What was measured.
	What string
	// Measured is the figure, relative where there is something to compare with, and
	// the absolute values beside.
	Measured string
	// Compared is what it was compared with, in the same run; may be empty.
	Compared string
	// Aim is what OK is decided by.
	Aim string
}

func (f Figure) verdict() string {
	if f.OK {
		return "ok"
	}
	return "MISS"
}

// print writes the row as a line.
func (f Figure) print(w io.Writer) {
	compared := f.Compared
	if compared != "" {
		compared = "; compared with " + compared
	}
	fmt.Fprintf(w, "%-4s %s: %s%s; aim %s\n", f.verdict(), f.What, f.Measured, compared, f.Aim)
}

// markdown is the table for scripts/bench/README.md.
func markdown(figures []Figure, environment string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n| | what | measured | compared with, same run | aim |\n|---|---|---|---|---|\n", environment)
	for _, f := range figures {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", f.verdict(), f.What, f.Measured, f.Compared, f.Aim)
	}
	return b.String()
}

// The lines of that README between which the table of a target of make is.
const (
	tableBegin = "<!-- make %s README=1 writes from here -->\n"
	tableEnd   = "<!-- to here -->"
)

// WriteTable puts the table of a target of make into the file at path.
func WriteTable(path, target string, figures []Figure) error {
	old, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	begin := fmt.Sprintf(tableBegin, target)
	before, rest, found := bytes.Cut(old, []byte(begin))
	_, after, foundEnd := bytes.Cut(rest, []byte(tableEnd))
	if !found || !foundEnd {
		return fmt.Errorf("%s: the lines %q and %q are missing: put them where the table belongs", path, begin, tableEnd)
	}
	text := fmt.Sprintf("%s%s%s%s%s", before, begin, markdown(figures, environment()), tableEnd, after)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// environment says on what the figures were taken.
func environment() string {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d cores, Linux %s, %s.", runtime.NumCPU(), unix.ByteSliceToString(uts.Release[:]), runtime.Version())
}
