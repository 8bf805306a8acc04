// Package table is what mesh DNS knows: the mesh domain and the upstream
// resolvers, the names with their addresses, and the pods in which DNS is
// served. Both ends of the table's stream use its value types. Table itself is
// the serving side: one writer applies whole changes, any number of readers look
// names up meanwhile. The package opens no socket and no file but the one in
// which a table outlives its process (File).
package table
