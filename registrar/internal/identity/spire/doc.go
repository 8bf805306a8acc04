// Package spire takes the workloads' certificates from the SPIRE agent of this node,
// by its Delegated Identity API: the registrar says by selectors whose certificate it
// wants, and the agent, which attests nothing of it, answers with certificates and
// keys of the registration entries that match, and renews them. The registrar must
// therefore be one of the agent's authorized_delegates, with an entry of its own.
//
// An entry for an account of the mesh has the SPIFFE ID of its Identity, the
// selectors of Selectors and nothing else; no other ID is ever used.
package spire
