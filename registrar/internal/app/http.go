package app

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	headerTimeout = 5 * time.Second
	stopTimeout   = 2 * time.Second
)

// serveHTTP serves /metrics, /healthz (the process answers) and /readyz (a pod
// could be added now; 503 names what is missing).
func (d *daemon) serveHTTP(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(d.metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, "ok") })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if missing := d.missing(); missing != "" {
			writeText(w, http.StatusServiceUnavailable, missing)
			return
		}
		writeText(w, http.StatusOK, "ready")
	})
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", d.cfg.HTTPAddress)
	if err != nil {
		return err
	}
	return serve(ctx, l, mux)
}

// serveAdmin serves what `registrar status` asks, on a socket of root's alone.
func (d *daemon) serveAdmin(ctx context.Context, l net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/status", d.handleStatus)
	return serve(ctx, l, mux)
}

func writeText(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	// The client is gone if this fails; there is nobody to tell.
	_, _ = w.Write([]byte(text + "\n"))
}

// serve serves h on l until ctx ends.
func serve(ctx context.Context, l net.Listener, h http.Handler) error {
	srv := &http.Server{Handler: h, ReadHeaderTimeout: headerTimeout}
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		_ = srv.Shutdown(sctx) // past the bound the process ends anyway
	})
	err := srv.Serve(l)
	if !stop() {
		<-done
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
