// Package installer puts the CNI plugin into the runtime's chain and keeps it
// there: it copies the binary, inserts our entry into the network configuration
// that the runtime loads, watches both folders, and takes the entry out again
// when the mesh is definitely removed from the node (CNI-D7, CNI-D8).
//
// # Where the entry goes
//
// A runtime loads the first file, by name, of .conf, .conflist and .json. If that
// is a list, the entry is spliced into its text and every other byte stays. If it
// is a single configuration, a symbolic link, or a list whose owner keeps writing
// it back, an owned list is put before it: a copy of it with our entry, remade
// when its source changes. Foreign files are never removed, renamed or converted.
//
// # Who may write
//
// A marker file in the configuration folder names the instance that wrote last.
// An older instance sees by it that it was replaced and only watches, so neither
// its repairs nor its clean-up touch what the newer one wrote (CNI-10). It takes
// over when the entry is missing for longer than a living owner needs.
//
// Package app calls it, for `registrar run`, `install` and `uninstall`. It never
// starts a process, and of the Kubernetes API it knows one question (Removal).
package installer
