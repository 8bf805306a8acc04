// Package spool keeps notes on disk: what the plugin leaves for the registrar
// when it cannot tell it (spoolDir), and what it leaves beside a netns pin while
// a pod is attached (netnsDir). The plugin writes and removes notes; the
// registrar scans a folder, acts, and removes what it acted on.
//
// A note is one file of protojson, written to a temporary file in the same
// folder, synced and renamed, so that a reader never meets half a note. Its name
// is made of the attachment's key, so there is at most one note of a kind for an
// attachment, and writing or removing it again changes nothing.
package spool
