package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"

	"github.com/portolan-mesh/portolan/api/port"
	"github.com/portolan-mesh/portolan/scripts/answer"
)

// The response headers of every HTTP answer and the header metadata of every
// gRPC answer.
const (
	headerPod       = "x-pod"
	headerContainer = "x-container"
	headerPort      = "x-port"
	headerAuthority = "x-seen-authority"
	headerXFCC      = "x-seen-xfcc"
)

// newHTTPHandler serves one port: gRPC requests by the standard health service,
// all others by an echo. /status/<code> answers with that status, ?hold=2s
// delays the answer, and a request to upgrade gets its bytes echoed.
func newHTTPHandler(log *slog.Logger, protocol port.Protocol, from answer.Origin) http.Handler {
	grpcServer := newGRPCServer(from)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		log.Info("request", "port", from.Port, "protocol", r.Proto, "authority", r.Host, "path", r.URL.Path)
		switch {
		case protocol == port.H2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc"):
			grpcServer.ServeHTTP(w, r)
		case r.Header.Get("Upgrade") != "":
			upgrade(w, r)
		default:
			serveEcho(w, r, from)
		}
	})
}

func serveEcho(w http.ResponseWriter, r *http.Request, from answer.Origin) {
	size, err := io.Copy(io.Discard, r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if hold, err := time.ParseDuration(r.URL.Query().Get("hold")); err == nil && !sleep(r.Context(), hold) {
		return
	}
	status := http.StatusOK
	if code, ok := strings.CutPrefix(r.URL.Path, "/status/"); ok {
		if status, err = strconv.Atoi(code); err != nil || status < 200 || status > 599 {
			http.Error(w, fmt.Sprintf("status %q: not in 200-599", code), http.StatusBadRequest)
			return
		}
	}
	reply := answer.Echo{
		Origin:    from,
		Protocol:  r.Proto,
		Authority: r.Host,
		Method:    r.Method,
		Path:      r.URL.Path,
		XFCC:      r.Header.Get("X-Forwarded-Client-Cert"),
		Remote:    r.RemoteAddr,
		Bytes:     size,
		Headers:   r.Header,
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set(headerPod, from.Pod)
	w.Header().Set(headerPort, strconv.Itoa(int(from.Port)))
	w.WriteHeader(status)
	_ = printJSON(w, reply)
}

// upgrade switches protocols as a WebSocket server would and echoes what comes.
func upgrade(w http.ResponseWriter, r *http.Request) {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, "upgrade: "+err.Error(), http.StatusNotImplemented)
		return
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n",
		r.Header.Get("Upgrade")); err != nil {
		return
	}
	_, _ = io.Copy(conn, buffered)
}

// newGRPCServer serves grpc.health.v1 and says in the header metadata which
// server answered and what it saw of the caller.
func newGRPCServer(from answer.Origin) *grpc.Server {
	server := grpc.NewServer(grpc.UnaryInterceptor(
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			seen, _ := metadata.FromIncomingContext(ctx)
			header := metadata.Pairs(
				headerPod, from.Pod,
				headerContainer, from.Container,
				headerPort, strconv.Itoa(int(from.Port)),
				headerAuthority, strings.Join(seen.Get(":authority"), ","),
				headerXFCC, strings.Join(seen.Get("x-forwarded-client-cert"), ","),
			)
			if err := grpc.SetHeader(ctx, header); err != nil {
				return nil, err
			}
			return handler(ctx, req)
		}))
	healthpb.RegisterHealthServer(server, health.NewServer())
	return server
}
