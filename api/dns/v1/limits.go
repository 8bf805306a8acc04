package dnsv1

import (
	"net/netip"
	"strings"

	"github.com/portolan-mesh/portolan/api/limit"
)

// The limits that dns.proto states. Both ends check them with Validate before
// they act on a message; lengths are in bytes.
const (
	// MaxMessage is the size that both ends allow for one gRPC message.
	MaxMessage = 4 << 20
	// MaxNames bounds the names that are kept in all.
	MaxNames = 262144
	// MaxPods bounds the pods that are kept in all.
	MaxPods = 4096
	// MaxChunkNames bounds the names that one message sets or removes.
	MaxChunkNames = 4096
	// MaxChunkPods bounds the pods that one message sets or reports.
	MaxChunkPods = 512
	// MaxName bounds a DNS name in its textual form.
	MaxName = 253
	// MaxLabel bounds one label of a name.
	MaxLabel = 63
	// MaxAddress bounds one textual IP address without zone.
	MaxAddress = 39
	// MaxUpstreams bounds each list of upstream resolvers.
	MaxUpstreams = 8
	// MaxUpstream bounds one upstream, address and port.
	MaxUpstream = 64
	// MaxPath bounds a path (PATH_MAX).
	MaxPath = 4096
	// MaxError bounds an error text.
	MaxError = 512
	// Port is where DNS is served on the loopback of every pod (contract 7). An
	// upstream on it would be this very process.
	Port = 15053
)

// checkName refuses what is not a host name of two labels or more in lower case
// without a trailing dot. One label is refused so that no table can take over
// names such as "localhost". The error is a *limit.FieldError.
func checkName(field, name string) error {
	if err := limit.Bytes(field, name, MaxName); err != nil {
		return err
	}
	labels := 0
	for label := range strings.SplitSeq(name, ".") {
		labels++
		if !isLabel(label) {
			return limit.Errorf(field, "%q: %q is no label of a host name (a-z, 0-9, \"_\" and \"-\" inside, 1-%d bytes)", name, label, MaxLabel)
		}
	}
	if labels < 2 {
		return limit.Errorf(field, "%q has one label, two or more are needed", name)
	}
	return nil
}

// isLabel allows the underscore, which names of other registries may carry.
func isLabel(s string) bool {
	if s == "" || len(s) > MaxLabel || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}

// checkVIP refuses what no connection can be made to. Empty is allowed.
func checkVIP(field, value string, is4 bool) error {
	if value == "" {
		return nil
	}
	if err := limit.Bytes(field, value, MaxAddress); err != nil {
		return err
	}
	addr, err := netip.ParseAddr(value)
	switch {
	case err != nil || addr.Zone() != "":
		return limit.Errorf(field, "%q is no IP address without zone", value)
	case addr.Is4() != is4 || addr.Is4In6():
		return limit.Errorf(field, "%q is of the wrong address family", value)
	case addr.IsUnspecified() || addr.IsMulticast() || addr.IsLoopback():
		return limit.Errorf(field, "%q is no address of a service", value)
	}
	return nil
}

// checkUpstream refuses what is no address of a resolver, and this process' own
// port on a loopback address: a query must never be forwarded to its forwarder.
// The error is a *limit.FieldError.
func checkUpstream(field, value string) error {
	if err := limit.Bytes(field, value, MaxUpstream); err != nil {
		return err
	}
	ap, err := netip.ParseAddrPort(value)
	if err != nil {
		return limit.Errorf(field, "%q is no address:port or [address]:port", value)
	}
	addr := ap.Addr().Unmap()
	switch {
	case ap.Port() == 0 || addr.IsUnspecified() || addr.IsMulticast():
		return limit.Errorf(field, "%q is no address of a resolver", value)
	case addr.IsLoopback() && ap.Port() == Port:
		return limit.Errorf(field, "%q is the mesh DNS itself; name the resolver behind it", value)
	}
	return nil
}

func checkUpstreams(field string, upstreams []string) error {
	return limit.List(field, upstreams, MaxUpstreams, checkUpstream)
}
