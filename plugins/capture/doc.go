// Package capture programs what a pod's network namespace sends to the mesh: one
// nftables table of our own (inet portolan) and a route for the service
// addresses. The CNI plugin applies it at ADD; the registrar applies it again
// when it repairs a flushed table or adopts a running pod, keeps its TCP ports
// current, and its DNS process keeps the redirection of DNS alive.
//
// What is captured, in this order (contract 7, dataplane decisions 8 and 9):
//
//	loopback, sockets with Mark                      never
//	excluded ranges and ports                        never
//	TCP to a (VIP, port) in tcp_ports4, tcp_ports6   to :15002
//	other TCP to the VIP ranges                      to :15001
//	UDP and TCP to port 53                           to :15053, while alive holds 53
//	anything else                                    never
//
// The rules are values made by a pure builder (ruleset.go); programming them is
// one nftables transaction, so a namespace has the old rules or the new ones,
// never a part (CNI-48). Foreign tables are never touched.
//
// Nothing here runs another program, resolves a name or reads a file of the pod.
// Only threads of their own enter the namespace; one that cannot come back is
// discarded.
package capture
