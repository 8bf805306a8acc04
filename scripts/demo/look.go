package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// lookAround prints how to enter the node and its pods from another terminal.
func lookAround(out io.Writer, sc *scene) {
	fmt.Fprintf(out, "\nIt stays until Ctrl-C (or kill -INT %s). From another terminal, as root:\n", sandbox.InitPID())
	fmt.Fprintf(out, "  node='nsenter -t %s -m -n -p -u --wd=/'\n  client=\"$node nsenter -t %d -n -m\"\n", sandbox.InitPID(), sc.client.PID())
	podserver := sc.node.Binary("podserver")
	for _, line := range []struct{ what, command string }{
		{"a shell on the node", "$node bash"},
		{"what the registrar knows", "$node " + sc.node.Binary("registrar") + " status"},
		{"requests from the client pod", "$client curl -s http://" + payments + ":8080/; $client curl -si http://" + payments + ":7777/"},
		{"gRPC, raw TCP and a name that nobody has", strings.Join([]string{
			"$client " + podserver + " grpc " + payments + ":9090",
			"$client " + podserver + " tcp " + payments + ":5432",
			"$client " + podserver + " lookup ghost.aether.internal",
		}, "; ")},
		{"Envoy's endpoints", "$node curl -s --unix-socket /run/portolan/envoy/admin.sock http://envoy/clusters | grep -E '15008::(health|rq_total)'"},
		{"what is captured in the client pod", "$client nft list table inet portolan"},
		{"the logs", "$node tail -n 50 -f " + logDir + "/registrar-run.log " + logDir + "/envoy.log"},
	} {
		fmt.Fprintf(out, "  # %s\n  %s\n", line.what, line.command)
	}
}
