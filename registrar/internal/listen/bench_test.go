package listen_test

import (
	"context"
	"fmt"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/registrar/internal/listen"
	"github.com/portolan-mesh/portolan/scripts/netnstest"
)

// BenchmarkTable shows that reading costs the same whatever connections there are:
// only the listen state is asked for.
func BenchmarkTable(b *testing.B) {
	for _, established := range []int{0, 10_000} {
		b.Run(fmt.Sprintf("established=%d", established), func(b *testing.B) {
			pod := netnstest.New(b)
			l := listenAt(b, pod, "0.0.0.0:8080", listenOptions{})
			listenAt(b, pod, "[::]:15008", listenOptions{})
			listenAt(b, pod, "127.0.0.1:15001", listenOptions{})
			listenAt(b, pod, "127.0.0.1:15002", listenOptions{})
			connectMany(b, pod, l, established/2) // two sockets each
			table := openTable(b, pod.Path)
			b.Run("Read", func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if s := read(b, table); s.Len() != 4 {
						b.Fatalf("%d listeners", s.Len())
					}
				}
			})
			b.Run("Lookup", func(b *testing.B) {
				b.ReportAllocs()
				ports := []uint16{8080, 15008, 15001, 15002}
				for b.Loop() {
					if s, err := table.Lookup(ports); err != nil || s.Len() != 4 {
						b.Fatalf("%d listeners, %v", s.Len(), err)
					}
				}
			})
		})
	}
}

// connectMany makes connections to l that stay until the benchmark ends.
func connectMany(b *testing.B, n *netnstest.Namespace, l net.Listener, count int) {
	b.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		b.Fatal(err)
	}
	limit.Cur = limit.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		b.Fatal(err)
	}
	n.Do(b, func() error {
		for range count {
			c, err := (&net.Dialer{}).DialContext(context.Background(), "tcp4", fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port))
			if err != nil {
				return err
			}
			s, err := l.Accept()
			if err != nil {
				return err
			}
			b.Cleanup(func() { _, _ = c.Close(), s.Close() })
		}
		return nil
	})
}

// BenchmarkOpen is what an ADD pays.
func BenchmarkOpen(b *testing.B) {
	pod := netnstest.New(b)
	for b.Loop() {
		table, err := listen.Open(pod.Path)
		if err != nil {
			b.Fatal(err)
		}
		if err := table.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
