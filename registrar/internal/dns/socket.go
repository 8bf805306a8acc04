package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/unixsocket"
)

// lockPoll is how often a process that waits for its predecessor looks.
const lockPoll = 100 * time.Millisecond

// listenSocket listens on the socket, for this user and root, once no other process
// does. During an update two processes may overlap: the new one then waits, ready,
// instead of failing and being restarted with a back-off.
func listenSocket(ctx context.Context, socket string, log *slog.Logger) (net.Listener, error) {
	ticker := time.NewTicker(lockPoll)
	defer ticker.Stop()
	for waited := false; ; waited = true {
		l, err := unixsocket.Listen(ctx, unixsocket.Config{
			Path: socket, UID: unixsocket.Keep, GID: unixsocket.Keep, Mode: 0o600,
			Users: []uint32{0, uint32(os.Geteuid())},
		})
		switch {
		case err == nil:
			// The folder may be there with another mode, made by whoever mounted it.
			if err := os.Chmod(filepath.Dir(socket), 0o700); err != nil { //nolint:gosec // a folder needs its search bit
				return nil, errors.Join(fmt.Errorf("folder of the table's socket: %w", err), l.Close())
			}
			return l, nil
		case !errors.Is(err, unixsocket.ErrInUse):
			return nil, err
		case !waited:
			log.Warn("another mesh-DNS process serves; waiting for it to end", "socket", socket)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-ticker.C:
		}
	}
}
