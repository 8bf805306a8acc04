// Package embedded is the registry of one machine: records in memory, stored in
// the bucket "endpoints" of state.db for the next start. The memory is the truth
// and what watchers see; one goroutine writes behind it, in batches, so that no
// publisher waits for a disk, and a disk that is full or broken costs nothing but
// what would be forgotten in a restart (Health says so).
//
// A record that cannot be read at start is moved to the bucket "endpoints.corrupt"
// and named in the log; the others are served.
package embedded
