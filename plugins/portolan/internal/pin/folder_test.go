package pin

import (
	"strings"
	"testing"
)

// The last mount on a path is the one that counts, and a path may hold escapes.
func TestSharedIn(t *testing.T) {
	const mountinfo = `22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /run rw,nosuid master:3 - tmpfs tmpfs rw
31 30 0:25 /a /run/a rw shared:7 - tmpfs tmpfs rw
32 30 0:25 /b /run/b rw shared:7 master:1 - tmpfs tmpfs rw,shared:9
33 30 0:25 /c /run/c rw shared:7 - tmpfs tmpfs rw
34 33 0:25 /c /run/c rw - tmpfs tmpfs rw,shared:9
35 30 0:25 /d /run/a\040b\134 rw shared:8 - tmpfs tmpfs rw
short line
`
	for dir, want := range map[string]bool{
		"/": true, "/run": false, "/run/a": true, "/run/b": true, "/run/c": false, `/run/a b\`: true, "/run/none": false, "/ru": false,
	} {
		if got, err := sharedIn(strings.NewReader(mountinfo), dir); err != nil || got != want {
			t.Errorf("sharedIn(%q) = %t, %v, want %t", dir, got, err, want)
		}
	}
}
