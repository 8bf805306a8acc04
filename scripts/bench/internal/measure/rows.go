package measure

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// Row is a measurement that gives one or more rows of the table; R is what the
// measurements share.
type Row[R any] struct {
	// Name is what -rows calls it.
	Name string
	// Measure may return figures beside an error.
	Measure func(context.Context, R) ([]Figure, error)
}

// Selection is a choice of rows, and whether a README gets them.
type Selection struct {
	// Rows are their names, separated by commas; empty for all.
	Rows string
	// Readme is the file that gets the table; empty for none.
	Readme string
}

// Flags defines the flags of the selection; a program calls it before it parses.
func Flags[R any](rows []Row[R]) *Selection {
	names := make([]string, len(rows))
	for i, row := range rows {
		names[i] = row.Name
	}
	var s Selection
	flag.StringVar(&s.Rows, "rows", "", "measure only these, separated by commas: "+strings.Join(names, ", "))
	flag.StringVar(&s.Readme, "readme", "", "put the table into this file too")
	return &s
}

// Choose returns the rows of the selection.
func Choose[R any](s Selection, rows []Row[R]) ([]Row[R], error) {
	if s.Rows == "" {
		return rows, nil
	}
	if s.Readme != "" {
		return nil, errors.New("-readme: the table there has all rows: leave -rows out")
	}
	var out []Row[R]
	for name := range strings.SplitSeq(s.Rows, ",") {
		i := slices.IndexFunc(rows, func(row Row[R]) bool { return row.Name == strings.TrimSpace(name) })
		if i < 0 {
			return nil, fmt.Errorf("-rows: there is no %q", name)
		}
		out = append(out, rows[i])
	}
	return out, nil
}

// Run measures rows, each of which it prints to out, and returns the table. The
// error names what could not be measured. program is for the progress on standard
// error.
func Run[R any](ctx context.Context, program string, out io.Writer, shared R, rows []Row[R]) ([]Figure, error) {
	var figures []Figure
	var errs []error
	for _, row := range rows {
		begin := time.Now()
		fmt.Fprintf(os.Stderr, "%s: %s ...\n", program, row.Name)
		got, err := row.Measure(ctx, shared)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s could not be measured: %w", row.Name, err))
		}
		for _, f := range got {
			f.print(out)
		}
		figures = append(figures, got...)
		fmt.Fprintf(os.Stderr, "%s: %s took %s\n", program, row.Name, time.Since(begin).Round(100*time.Millisecond))
		if ctx.Err() != nil {
			break
		}
	}
	return figures, errors.Join(errs...)
}
