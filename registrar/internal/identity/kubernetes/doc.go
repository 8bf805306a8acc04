// Package kubernetes signs the workloads of a cluster. One Signer, which holds a
// Lease, owns the Secret with the CA's roots; nodes ask it by
// CertificateSigningRequests and find the roots that they trust in a ConfigMap. No
// registrar has a signing key, and none speaks to another (contract 4.7).
//
//	registrar run (Requester)  --CertificateSigningRequest-->  registrar signer (Signer)
//	                           <------status.certificate-----
//	                           <------ConfigMap: roots-------
//
// The API server writes down who asks: the ServiceAccount and, from the token that
// is bound to the asking pod, its node. The Signer signs an account only for a node
// that runs a pod of it.
package kubernetes
