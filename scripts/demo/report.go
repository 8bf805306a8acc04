package main

import (
	"context"
	"fmt"
	"io"
	"strings"
)

// check is one thing that a user would try.
type check struct {
	// asked is the command or the question.
	asked string
	// expected is the answer that the contract gives.
	expected string
	// ask gets the answer, and whether it is the expected one.
	ask func(context.Context) (received string, ok bool)
}

// called is the check with a note beside what is asked.
func (c check) called(note string) check {
	c.asked += " (" + note + ")"
	return c
}

// report prints a line for each check and counts.
type report struct {
	out            io.Writer
	passed, failed int
}

const lineFormat = "%-4s  %-71s  %-32s  %s\n"

func (r *report) head() { fmt.Fprintf(r.out, lineFormat, "", "asked", "expected", "received") }

// run asks and prints. Once the context has ended it does nothing: an answer
// that was cut off says nothing about the mesh.
func (r *report) run(ctx context.Context, c check) {
	if ctx.Err() != nil {
		return
	}
	received, ok := c.ask(ctx)
	if ctx.Err() != nil {
		return
	}
	mark := "ok"
	if ok {
		r.passed++
	} else {
		mark = "FAIL"
		r.failed++
	}
	// One line, whatever came back.
	received = strings.Join(strings.Fields(received), " ")
	fmt.Fprintf(r.out, lineFormat, mark, c.asked, c.expected, received)
}

func (r *report) total() {
	fmt.Fprintf(r.out, "\n%d passed, %d failed\n", r.passed, r.failed)
}
