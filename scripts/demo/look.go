package main

import (
	"fmt"
	"io"

	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// lookAround prints how to enter the node and its pods from another terminal.
func lookAround(out io.Writer, sc *scene) {
	enter := fmt.Sprintf("nsenter -t %s -m -n -p -u --wd=/", sandbox.InitPID())
	fmt.Fprintf(out, "\nIt stays until Ctrl-C. From another terminal, as root:\n")
	for _, line := range []struct{ what, command string }{
		{"a shell on the node", enter + " bash"},
		{"what the registrar knows", enter + " " + sc.node.Binary("registrar") + " status"},
		{"Envoy's clusters", enter + " curl -s --unix-socket /run/portolan/envoy/admin.sock http://envoy/clusters"},
		{"a request from the client pod", fmt.Sprintf("%s nsenter -t %d -n -m curl -sv http://%s:8080/", enter, sc.client.PID(), payments)},
		{"what is captured in it", fmt.Sprintf("%s nsenter -t %d -n nft list table inet portolan", enter, sc.client.PID())},
		{"the logs", enter + " tail -n 50 -f " + logDir + "/registrar-run.log " + logDir + "/envoy.log"},
	} {
		fmt.Fprintf(out, "  # %s\n  %s\n", line.what, line.command)
	}
}
