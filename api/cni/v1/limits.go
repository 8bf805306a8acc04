package cniv1

import (
	"net/netip"
	"strings"

	"github.com/portolan-mesh/portolan/api/limit"
)

// The limits that cni.proto states. Both ends check them with Validate before
// they act on a message; lengths are in bytes.
const (
	// MaxContainerID bounds Attachment.container_id.
	MaxContainerID = 253
	// MaxIfName bounds Attachment.ifname (IFNAMSIZ less its zero byte).
	MaxIfName = 15
	// MaxNetwork bounds every network name.
	MaxNetwork = 253
	// MaxPath bounds netns and runtime_netns (PATH_MAX).
	MaxPath = 4096
	// MaxAddresses bounds AddRequest.addresses.
	MaxAddresses = 8
	// MaxAddress bounds one textual IP address.
	MaxAddress = 45
	// MaxPrefix bounds one textual CIDR.
	MaxPrefix = 49
	// MaxCNIArgs bounds the pairs of AddRequest.cni_args.
	MaxCNIArgs = 32
	// MaxCNIArgKey bounds one key of AddRequest.cni_args.
	MaxCNIArgKey = 63
	// MaxCNIArgValue bounds one value of AddRequest.cni_args.
	MaxCNIArgValue = 253
	// MaxAnnotations bounds the entries of AddRequest.annotations.
	MaxAnnotations = 1024
	// MaxAnnotationKey bounds one annotation key: prefix, slash and name.
	MaxAnnotationKey = 317
	// MaxAnnotationsTotal bounds all keys and values together.
	MaxAnnotationsTotal = 256 << 10
	// MaxDNSServers bounds AddRequest.dns_servers.
	MaxDNSServers = 16
	// MaxReason bounds the reasons in responses.
	MaxReason = 1024
	// MaxTCPPorts bounds Capture.tcp_ports.
	MaxTCPPorts = 65536
	// MaxExcludes bounds Capture.exclude_ports and Capture.exclude_ranges, each.
	MaxExcludes = 64
	// MaxAttachments bounds the lists of GC.
	MaxAttachments = 65536
	// MaxMessage is the size that both ends must allow for one gRPC message: the
	// largest valid message is a GCRequest or GCResponse with MaxAttachments keys.
	MaxMessage = 20 << 20
)

// checkPath refuses a path that is not absolute or too long; empty is refused too.
func checkPath(field, path string) error {
	if err := limit.Bytes(field, path, MaxPath); err != nil {
		return err
	}
	if !strings.HasPrefix(path, "/") {
		return limit.Errorf(field, "%q is not an absolute path", path)
	}
	return nil
}

func checkAddress(field, addr string) error { return limit.Address(field, addr, MaxAddress) }

func checkPrefix(field, cidr string) (netip.Prefix, error) {
	if err := limit.Bytes(field, cidr, MaxPrefix); err != nil {
		return netip.Prefix{}, err
	}
	p, err := netip.ParsePrefix(cidr)
	if err != nil || p.Addr().Is4In6() {
		return netip.Prefix{}, limit.Errorf(field, "%q is not a CIDR such as 198.18.0.0/15", cidr)
	}
	return p, nil
}

// checkNetwork holds the name of a network to the form of the CNI specification.
func checkNetwork(field, network string) error {
	if err := limit.Bytes(field, network, MaxNetwork); err != nil {
		return err
	}
	if !isName(network) {
		return limit.Errorf(field, "%q does not match ^[a-zA-Z0-9][a-zA-Z0-9_.-]*$", network)
	}
	return nil
}

// isName reports whether s matches ^[a-zA-Z0-9][a-zA-Z0-9_.-]*$, the form that
// the CNI specification gives to container IDs and network names.
func isName(s string) bool {
	for i := range len(s) {
		c := s[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		case i > 0 && (c == '_' || c == '.' || c == '-'):
		default:
			return false
		}
	}
	return s != ""
}

// isIfName reports whether s can name a network interface and a file.
func isIfName(s string) bool {
	if s == "" || s == "." || s == ".." {
		return false
	}
	for i := range len(s) {
		// Control bytes, blanks and bytes beyond ASCII never occur in the names
		// that runtimes give, and have no business in a file name.
		if c := s[i]; c <= ' ' || c >= 0x7f || c == '/' || c == ':' {
			return false
		}
	}
	return true
}
