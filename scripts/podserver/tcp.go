package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/scripts/answer"
)

// serveTCP is a server-first protocol: each connection gets a banner that names
// the server, then every byte back. It ends with the context and closes what is open.
func serveTCP(ctx context.Context, log *slog.Logger, listener net.Listener, from answer.Origin) error {
	var open sync.WaitGroup
	defer open.Wait()
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	for {
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept on %s: %w", listener.Addr(), err)
		}
		log.Info("connection", "port", from.Port, "remote", conn.RemoteAddr().String())
		open.Go(func() {
			closed := context.AfterFunc(ctx, func() { _ = conn.Close() })
			defer closed()
			defer conn.Close()
			if _, err := fmt.Fprintf(conn, "hello from %s port %d\n", from.Pod, from.Port); err != nil {
				return
			}
			_, _ = io.Copy(conn, conn)
		})
	}
}

// tcpCommand dials, reads the banner, sends a line and reads it back.
// With -duration it goes on sending lines and reading them back for so long.
// With -client-first it speaks before it reads, as an HTTP client would.
func tcpCommand(flags *flag.FlagSet) func(context.Context, []string, io.Writer) error {
	timeout := flags.Duration("timeout", 10*time.Second, "time for the whole exchange")
	first := flags.Bool("client-first", false, "send the line before the banner is read")
	duration := flags.Duration("duration", 0, "go on with the same connection for this long, beyond -timeout")
	return func(ctx context.Context, args []string, stdout io.Writer) error {
		if len(args) < 1 || len(args) > 2 {
			return usageError{errors.New("tcp: want host:port [line]")}
		}
		line := "ping"
		if len(args) == 2 {
			line = args[1]
		}
		ctx, cancel := context.WithTimeout(ctx, *timeout)
		defer cancel()
		begin := time.Now()
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "tcp", args[0])
		if err != nil {
			return fmt.Errorf("dial %s: %w", args[0], err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(begin.Add(*timeout + *duration)); err != nil {
			return fmt.Errorf("set the deadline of %s: %w", args[0], err)
		}
		got := exchange(conn, line, *first, begin.Add(*duration))
		got.Millis = time.Since(begin).Milliseconds()
		return printJSON(stdout, got)
	}
}

// linePause is between two lines of a connection that goes on.
const linePause = 20 * time.Millisecond

// exchange speaks the protocol of serveTCP at least once, until end, and keeps how
// far it came.
func exchange(conn net.Conn, line string, clientFirst bool, end time.Time) (got answer.TCP) {
	reader := bufio.NewReader(conn)
	send := func() error {
		_, err := io.WriteString(conn, line+"\n")
		return err
	}
	read := func(into *string) func() error {
		return func() error {
			line, err := reader.ReadString('\n')
			*into = strings.TrimSuffix(line, "\n")
			return err
		}
	}
	steps := []func() error{read(&got.Banner), send, read(&got.Echo)}
	if clientFirst {
		steps[0], steps[1] = steps[1], steps[0]
	}
	for {
		for _, step := range steps {
			if err := step(); err != nil {
				got.Error = err.Error()
				return got
			}
		}
		got.Lines++
		if !time.Now().Before(end) {
			return got
		}
		time.Sleep(linePause)
		steps = []func() error{send, read(&got.Echo)}
	}
}
