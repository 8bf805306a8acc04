package dns_test

import (
	"errors"
	"io"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/registrar/internal/dns/dnstest"
)

// connectAs connects to a unix socket as another user and returns "EOF" when the
// other end closes, or what it says.
func connectAs(t *testing.T, uid int, socket string) (string, error) {
	t.Helper()
	var conn net.Conn
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The thread with the other uid ends with this goroutine. The raw call
		// changes this thread alone.
		runtime.LockOSThread()
		if _, _, errno := syscall.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); errno != 0 {
			err = errno
			return
		}
		conn, err = net.Dial("unix", socket)
	}()
	<-done
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(dnstest.Patience))
	buf := make([]byte, 100)
	n, err := conn.Read(buf)
	if errors.Is(err, io.EOF) {
		return "EOF", nil
	}
	return string(buf[:n]), err
}

// reuseAddr lets two sockets have one source port.
func reuseAddr(_, _ string, c syscall.RawConn) error {
	var err error
	ctlErr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(err, ctlErr)
}

func asDNSError(err error, target **net.DNSError) bool { return errors.As(err, target) }
