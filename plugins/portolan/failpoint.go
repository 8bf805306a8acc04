//go:build !failpoints

package main

// failpoint does nothing in a released binary. Tests build the plugin with the
// tag failpoints, and then make it print, panic or die here.
func failpoint(string) {}
