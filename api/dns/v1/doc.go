// Package dnsv1 is the contract between `registrar run` and `registrar dns`: how
// the table of mesh DNS is sent from one to the other, and how it is kept on
// disk. The messages are generated from dns.proto, which documents them; limits
// and their checks are written by hand.
package dnsv1
