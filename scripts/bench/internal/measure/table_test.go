package measure_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
)

// The README that the Makefile names has a place for the table of each target; the
// table goes there, and all else stays.
func TestWriteTable(t *testing.T) {
	makefile, err := os.ReadFile("../../../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(makefile), "-readme scripts/bench/README.md"); n != 2 {
		t.Errorf("%d targets write into scripts/bench/README.md, want 2", n)
	}
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"bench", "bench-kubernetes"} {
		path := filepath.Join(t.TempDir(), "README.md")
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := measure.WriteTable(path, target, []measure.Figure{{What: "a row of " + target}}); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		begin := "<!-- make " + target + " README=1 writes from here -->"
		before, old, _ := strings.Cut(string(text), begin)
		_, after, _ := strings.Cut(old, "<!-- to here -->")
		written, ok := strings.CutPrefix(string(got), before+begin)
		table, ok2 := strings.CutSuffix(written, "<!-- to here -->"+after)
		if !ok || !ok2 || strings.Count(table, "\n| ") != 2 || !strings.Contains(table, "| a row of "+target+" |") {
			t.Errorf("%s wrote\n%s", target, got)
		}
	}
}
