// Package answer holds what the servers and clients of podserver print, as JSON:
// podserver writes these types, the harness reads them.
package answer

import (
	"fmt"
	"net/http"
)

// Origin says which server gave an answer. It is zero for an answer that no pod
// gave, such as one of Envoy's own.
type Origin struct {
	// Pod is the pod's name.
	Pod string `json:"pod"`
	// Container is the container's name, may be empty.
	Container string `json:"container,omitempty"`
	// Port is the port that the server listens on.
	Port uint16 `json:"port"`
}

// String returns pod:port, or "" for the zero value.
func (o Origin) String() string {
	if o.Pod == "" {
		return ""
	}
	return fmt.Sprintf("%s:%d", o.Pod, o.Port)
}

// Echo is the answer of an HTTP server: who answered, and what arrived there.
type Echo struct {
	Origin

	// Protocol is the request's, for example HTTP/1.1 or HTTP/2.0.
	Protocol string `json:"protocol"`
	// Authority is the Host header or :authority.
	Authority string `json:"authority"`
	// Method and Path are the request's.
	Method string `json:"method"`
	Path   string `json:"path"`
	// XFCC is x-forwarded-client-cert: the caller's identity.
	XFCC string `json:"xfcc,omitempty"`
	// Remote is the address of the socket's other end.
	Remote string `json:"remote"`
	// Bytes is the length of the request's body.
	Bytes int64 `json:"bytes,omitempty"`
	// Headers are all that arrived.
	Headers http.Header `json:"headers"`
}

// Tally is what `podserver get` counted. The keys of Answers are "200
// payments-1:8080" for an answer of a pod, "503" for one of nobody, and
// "error: ..." for a request without an answer.
type Tally struct {
	// Requests were sent.
	Requests int `json:"requests"`
	// Answers by what they were.
	Answers map[string]int `json:"answers"`
	// Callers are the identities that the pods saw, by x-forwarded-client-cert.
	Callers map[string]int `json:"callers,omitempty"`
	// MaxMillis is the slowest request's time.
	MaxMillis int64 `json:"maxMillis"`
}

// GRPC is what a gRPC client saw.
type GRPC struct {
	// Code is the gRPC status, "OK" when there was an answer.
	Code string `json:"code"`
	// Message of the status.
	Message string `json:"message,omitempty"`
	// Health is the status in the health service's answer.
	Health string `json:"health,omitempty"`
	// Origin is what the server says of itself.
	Origin

	// Authority and XFCC are what arrived there.
	Authority string `json:"authority,omitempty"`
	XFCC      string `json:"xfcc,omitempty"`
}

// TCP is what a raw TCP client saw.
type TCP struct {
	// Banner is the first line that the server sent by itself.
	Banner string `json:"banner"`
	// Echo is the line that came back for the one sent, Lines how many did.
	Echo  string `json:"echo"`
	Lines int    `json:"lines"`
	// Error is how the connection ended when it did not end well.
	Error string `json:"error,omitempty"`
	// Millis is the time from the dial to the end.
	Millis int64 `json:"millis"`
}

// DNS is a DNS answer as it came over the wire.
type DNS struct {
	// Name and Type are what was asked for.
	Name string `json:"name"`
	Type string `json:"type"`
	// Rcode is NOERROR, NXDOMAIN and so on.
	Rcode string `json:"rcode"`
	// Addresses of the answer section.
	Addresses []string `json:"addresses"`
	// TTL is the lowest of the answer, or of the SOA for a negative answer, in seconds.
	TTL uint32 `json:"ttl"`
	// Authoritative says who answered: the owner of the name, or a cache.
	Authoritative bool `json:"authoritative"`
	// Error says why there was no answer.
	Error string `json:"error,omitempty"`
}
