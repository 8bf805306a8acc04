package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The report has one line for each check, whatever the answer looks like, and
// ends with how many passed and failed.
func TestReport(t *testing.T) {
	var out bytes.Buffer
	r := &report{out: &out}
	r.head()
	answer := func(received string, ok bool) func(context.Context) (string, bool) {
		return func(context.Context) (string, bool) { return received, ok }
	}
	r.run(t.Context(), check{asked: "curl a", expected: "200", ask: answer("200", true)})
	r.run(t.Context(), check{asked: "curl b", expected: "503", ask: answer("no\n  answer", false)})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	r.run(ended, check{asked: "curl c", expected: "200", ask: answer("200", true)})
	r.total()
	line := func(mark, asked, expected, received string) string {
		return fmt.Sprintf(lineFormat, mark, asked, expected, received)
	}
	want := line("", "asked", "expected", "received") +
		line("ok", "curl a", "200", "200") +
		line("FAIL", "curl b", "503", "no answer") +
		"\n1 passed, 1 failed\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
}

// What was asked is shown as a user would type it.
func TestShell(t *testing.T) {
	got := shell("curl", []string{"-H", "Host: evil.com", "http://a/"})
	if want := "curl -H 'Host: evil.com' http://a/"; got != want {
		t.Errorf("shell = %s, want %s", got, want)
	}
}

// The logs of a failed demo are outside of the sandbox, and the error says where.
func TestCopyLogs(t *testing.T) {
	from, temp := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", temp)
	if err := os.WriteFile(filepath.Join(from, "envoy.log"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	err := copyLogs(from, errFailed)
	copies, globErr := filepath.Glob(filepath.Join(temp, "portolan-demo-*", "envoy.log"))
	if globErr != nil || len(copies) != 1 {
		t.Fatalf("copies are %v (%v)", copies, globErr)
	}
	if !errors.Is(err, errFailed) || !strings.Contains(err.Error(), filepath.Dir(copies[0])) {
		t.Errorf("copyLogs = %v, want it to name %s", err, filepath.Dir(copies[0]))
	}
}
