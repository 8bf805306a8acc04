// Package state opens state.db, the bbolt file in which a registrar keeps what
// it must not forget over a restart. A file that is damaged is never used and
// never lost: it is renamed, named in the log and in the Recovery, and a fresh one
// takes its place, to be filled from what is attached to the node.
//
// bbolt follows the page numbers that it reads in the file without looking at
// them, and reads through a memory map: a damaged number is a fault that ends the
// process, not an error. So the file is walked with plain reads first (verify),
// and bbolt only ever sees one whose numbers lead to where they should.
//
// Buckets belong to the packages that use the file.
package state
