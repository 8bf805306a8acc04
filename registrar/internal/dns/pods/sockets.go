package pods

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// sockets are what is open in one pod.
type sockets struct {
	udp []*net.UDPConn
	tcp []*net.TCPListener
	id  identity
}

// openSockets opens UDP and TCP on the loopback of the namespace at path: all of
// them or none.
func openSockets(ctx context.Context, path string, addrs []netip.AddrPort) (*sockets, error) {
	ns, err := openNamespace(path)
	if err != nil {
		return nil, err
	}
	defer ns.close()
	s := &sockets{id: ns.id}
	err = ns.do(func() error {
		for _, a := range addrs {
			if err := s.open(ctx, a); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("serve DNS in %s: %w", path, err), s.close())
	}
	return s, nil
}

func (s *sockets) open(ctx context.Context, addr netip.AddrPort) error {
	udp, tcp := "udp4", "tcp4"
	if addr.Addr().Is6() {
		udp, tcp = "udp6", "tcp6"
	}
	lc := net.ListenConfig{Control: freebind}
	lc.SetMultipathTCP(false)
	packet, err := lc.ListenPacket(ctx, udp, addr.String())
	if err != nil {
		return explain(err)
	}
	s.udp = append(s.udp, packet.(*net.UDPConn))
	stream, err := lc.Listen(ctx, tcp, addr.String())
	if err != nil {
		return explain(err)
	}
	s.tcp = append(s.tcp, stream.(*net.TCPListener))
	return nil
}

func explain(err error) error {
	if errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("%w (something in the pod, or another mesh-DNS process, has this port; contract 1 reserves it)", err)
	}
	return err
}

// freebind lets the sockets open before the runtime has set the loopback up.
func freebind(network, _ string, c syscall.RawConn) error {
	var err error
	ctlErr := c.Control(func(fd uintptr) {
		if network == "udp6" || network == "tcp6" {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1)
			return
		}
		err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
	})
	return errors.Join(err, ctlErr)
}

// close closes everything; what reads from it gets net.ErrClosed.
func (s *sockets) close() error {
	var errs []error
	for _, c := range s.udp {
		errs = append(errs, c.Close())
	}
	for _, l := range s.tcp {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
