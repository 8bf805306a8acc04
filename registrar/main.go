// Command registrar is the node's half of the mesh: `run` is its control plane,
// `dns` its name service, `bootstrap` prints Envoy's configuration and `status`
// asks a running `run` what it knows.
package main

import (
	"os"

	"github.com/portolan-mesh/portolan/registrar/internal/app"
)

func main() {
	os.Exit(app.Main(os.Args[1:], os.Stdout, os.Stderr))
}
