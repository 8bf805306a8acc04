//go:build failpoints

package main

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// failpoint does at the point called name what PORTOLAN_FAILPOINT says:
// "name=print", "name=panic" or "name=kill".
func failpoint(name string) {
	at, action, _ := strings.Cut(os.Getenv("PORTOLAN_FAILPOINT"), "=")
	if at != name {
		return
	}
	switch action {
	case "print":
		fmt.Println("a stray line on standard output")
	case "panic":
		panic("failpoint " + name)
	case "kill":
		_ = unix.Kill(unix.Getpid(), unix.SIGKILL)
		select {}
	}
}
