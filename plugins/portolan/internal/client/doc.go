// Package client speaks to the registrar of this node over its unix socket and
// turns what goes wrong into CNI errors. Every call is bounded by its context.
// Nothing is resolved: the socket is a path, and no proxy or environment is
// looked at.
package client
