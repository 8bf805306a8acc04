// Package publisher turns records of the registry and local pods into Envoy
// resources, gates them and steps through what must be acknowledged.
//
// It is the single writer of the projection and of the xDS cache: every method
// takes the one lock, changes the projection, and applies what follows from it
// as one batch before it returns. Nothing is done under the lock that can wait
// for a file, a peer or a stream; what must (saving the catalogue, programming
// pods, telling the mesh DNS) is done by one settler goroutine, in that order,
// because a name may be answered only when its address is saved and the pods'
// port sets know it (dataplane decision 8).
//
// The registry's watch, the identity manager, attach and the cache's demand call
// it; it calls the cache and the settler's consumers. It opens no socket and
// reads no file.
package publisher
