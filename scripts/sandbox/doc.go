// Package sandbox runs a program inside namespaces of its own, so that the demo
// and the tests can use the paths, ports and interfaces of a real node without
// touching the machine, and so that nothing is left behind however they end.
//
//	func main() { os.Exit(sandbox.Run(realMain)) }
//	func TestMain(m *testing.M) { os.Exit(sandbox.Run(m.Run)) }
//
// Run starts the same binary again, twice:
//
//	outer   waits, forwards signals, passes the exit code on
//	init    process 1 of new mount, network, pid, uts and ipc namespaces: mounts
//	        what a node has, reaps orphans
//	inside  calls the function given to Run
//
// init gets SIGKILL when outer dies (a parent-death signal), and when init dies
// the kernel kills every process in its pid namespace. With the last process
// go the network namespaces, interfaces, nftables and mounts: no clean-up code
// has to run for that.
//
// Inside, the node has: an empty /run with shared mounts at /run/netns and
// /run/portolan/netns; /var/lib as before but with empty folders of its own for
// the names in private; a /proc of its pid namespace; a private
// /etc/resolv.conf that may be rewritten; lo up; the host name Hostname.
// Everything else of the file system is the machine's.
package sandbox
