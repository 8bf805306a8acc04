package listen

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// bufferSize holds every datagram of a dump: the kernel makes none larger than
// the largest buffer it was ever given on the socket, or 8 KiB.
const bufferSize = 8 << 10

// diagSocket is a NETLINK_SOCK_DIAG socket.
type diagSocket struct {
	fd  int
	buf []byte
}

// openDiagSocket opens a socket in the namespace of the calling thread, connected
// to the kernel: nobody else in the namespace can then send to it.
func openDiagSocket() (*diagSocket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("sock_diag socket (needs the kernel module inet_diag): %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to the kernel: %w", err), unix.Close(fd))
	}
	return &diagSocket{fd: fd, buf: make([]byte, bufferSize)}, nil
}

func (s *diagSocket) send(request []byte) error {
	for {
		if _, err := unix.Write(s.fd, request); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// receive does not have to wait: the kernel makes the first part of a dump while
// it takes the request, and each next one while the previous one is taken.
func (s *diagSocket) receive() ([]byte, error) {
	for {
		n, _, err := unix.Recvfrom(s.fd, s.buf, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, err
		case n > len(s.buf):
			return nil, fmt.Errorf("%w: datagram of %d bytes", errMalformed, n)
		}
		return s.buf[:n], nil
	}
}

func (s *diagSocket) close() error { return unix.Close(s.fd) }
