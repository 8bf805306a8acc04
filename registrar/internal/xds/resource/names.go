package resource

import (
	"strconv"
	"strings"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// The mesh's ports in a pod's network namespace (contract 7).
const (
	// InboundPort receives the mesh's mTLS connections; a load assignment names it
	// behind every pod address.
	InboundPort = 15008
	// OutboundHTTPPort receives the pod's captured HTTP connections.
	OutboundHTTPPort = 15001
	// OutboundTCPPort receives the pod's captured connections to tcp ports.
	OutboundTCPPort = 15002
)

// The mesh's own headers (contract 7). No application sees them in a request or
// in a response, whoever set them.
const (
	// NotDeliveredHeader marks a response that no application has made: the caller's
	// Envoy may send the request to another endpoint, whatever its method.
	NotDeliveredHeader = "x-portolan-not-delivered"
	// serverNameHeader carries the SNI of the connection to the route of a
	// single-port pod's only chain.
	serverNameHeader = "x-portolan-sni"
)

// Names of local things carry a "|", which no host name has: no authority that
// an application sends can ever name one of them (XDS-71), and no two kinds can
// have one name.
const (
	// RoutesName is the route table that all outbound HTTP listeners of a node share.
	RoutesName = "routes|http"
	// XDSCluster is the bootstrap's cluster of the registrar's xDS socket.
	XDSCluster = "xds|registrar"
	// noIdentity is the secret that a connection without a source identity would ask
	// for. It never exists, so such a connection fails.
	noIdentity = "no|identity"
	// noCluster is the cluster of the outbound TCP proxy before the connection's
	// destination names another one. It never exists.
	noCluster = "no|cluster"
)

// InboundListener names the inbound listener of the pod with this ID.
func InboundListener(id string) string { return "in|" + id }

// OutboundHTTPListener names the outbound HTTP listener of the pod with this ID.
func OutboundHTTPListener(id string) string { return "out-http|" + id }

// OutboundTCPListener names the outbound TCP listener of the pod with this ID.
func OutboundTCPListener(id string) string { return "out-tcp|" + id }

// AppClusterName names the cluster that leads to one port of the application in
// the pod with this ID.
func AppClusterName(id string, port uint16) string {
	return "app|" + id + "|" + portText(port)
}

// CertificateClusterName names the cluster that makes Envoy hold the certificate of id.
func CertificateClusterName(id model.Identity) string { return "certificate|" + id.SPIFFE() }

// InboundSecret names the certificate of id for the server side. The two sides
// have a name each because Envoy 1.40 never delivers a secret to the on-demand
// selector that a listener subscribed to first (dataplane 4b).
func InboundSecret(id model.Identity) string { return "in|" + id.SPIFFE() }

// OutboundSecret names the certificate of id for the client side; it is what the
// pod's outbound listeners put into the filter state.
func OutboundSecret(id model.Identity) string { return id.SPIFFE() }

// BundleSecret names the trust bundle of a trust domain.
func BundleSecret(trustDomain string) string { return "spiffe://" + trustDomain }

// chainName names the filter chain of one port.
func chainName(port uint16) string { return "port|" + portText(port) }

// The chains of a listener that match no served port.
const (
	chainUnknown = "unknown"
	chainReset   = "reset"
)

// serverNames returns the SNI values that lead to a port: the bare number, which
// Envoys send, and p-<number>, which also tools can send that drop a numeric one.
func serverNames(port uint16) []string {
	return []string{portText(port), "p-" + portText(port)}
}

// statName replaces what Envoy's statistics take for a separator, so that a
// name is one label in Prometheus. Names stay distinct: "_" is in no DNS label.
func statName(name string) string {
	return strings.NewReplacer(".", "_", ":", "_").Replace(name)
}

func portText(port uint16) string { return strconv.Itoa(int(port)) }
