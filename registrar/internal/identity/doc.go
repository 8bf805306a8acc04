// Package identity gives workloads their certificates (X.509 SVIDs).
//
// A Signer turns a certificate request into a chain: the built-in CA does so on
// one machine; a signer elsewhere fits behind the same interface, so that no
// signing key needs to lie on every node (contract 4.7). The Manager keeps one
// SVID per identity that is in use on this node, makes the private key itself,
// renews at half-life, and hands every change to its callbacks, which feed SDS.
//
// Files, all below one folder of mode 0700:
//
//	ca.pem      the roots with their keys (CA)
//	svids/*.pem SVIDs with their keys (FileStore), so that a restarted registrar
//	            hands Envoy the bytes it already has
//
// The package never opens a socket and never decides which pod has which
// identity: whoever calls Ensure does.
package identity
