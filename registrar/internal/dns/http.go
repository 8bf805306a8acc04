package dns

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	// httpRetry is the pause before the HTTP address is tried again.
	httpRetry = 2 * time.Second
	// httpTimeout bounds the reading of a request and the stop.
	httpTimeout = 5 * time.Second
)

// health is what /healthz says.
type health struct{ serving atomic.Bool }

func (h *health) set(serving bool) { h.serving.Store(serving) }

// ServeHTTP answers 200 while DNS is served from the table's socket.
func (h *health) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if !h.serving.Load() {
		http.Error(w, "mesh DNS is starting or stopping", http.StatusServiceUnavailable)
		return
	}
	_, _ = io.WriteString(w, "ok\n")
}

// web serves metrics and health.
type web struct {
	server  *http.Server
	cancel  context.CancelFunc
	running sync.WaitGroup
}

// serveHTTP starts it. An address that is taken is tried again: metrics never keep
// names from being served.
func serveHTTP(ctx context.Context, cfg Config, h *health) *web {
	mux := http.NewServeMux()
	mux.Handle("GET /healthz", h)
	mux.Handle("GET /metrics", promhttp.HandlerFor(cfg.Registry, promhttp.HandlerOpts{}))
	// It says that we are stopping until we have stopped.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	w := &web{server: &http.Server{Handler: mux, ReadHeaderTimeout: httpTimeout}, cancel: cancel}
	if cfg.HTTP != "" {
		w.running.Go(func() { w.serve(ctx, cfg.HTTP, cfg.Log) })
	}
	return w
}

func (w *web) serve(ctx context.Context, address string, log *slog.Logger) {
	for ctx.Err() == nil {
		var lc net.ListenConfig
		l, err := lc.Listen(ctx, "tcp", address)
		if err == nil {
			err = w.server.Serve(l)
		}
		if ctx.Err() != nil {
			return
		}
		log.Error("metrics and health are not served; trying again", "address", address, "error", err)
		timer := time.NewTimer(httpRetry)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (w *web) stop(ctx context.Context) {
	w.cancel()
	ctx, cancel := context.WithTimeout(ctx, httpTimeout)
	defer cancel()
	_ = w.server.Shutdown(ctx)
	w.running.Wait()
}
