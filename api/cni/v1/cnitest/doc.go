// Package cnitest is a real gRPC registrar on a temporary unix socket whose
// answers a test injects. The plugin's tests talk to it instead of a registrar;
// it validates requests as the real one does, and it is never part of a binary.
package cnitest
