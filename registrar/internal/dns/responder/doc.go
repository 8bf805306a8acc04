// Package responder decides what happens with one query: it is answered from the
// table, refused, dropped, or forwarded. It is pure: bytes in, bytes out, no
// socket, no clock. Everything that a pod can send passes through Respond, so it
// is the part that is fuzzed.
package responder
