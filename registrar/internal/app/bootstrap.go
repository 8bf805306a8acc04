package app

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

func newBootstrapCommand(s streams) *cobra.Command {
	var (
		mesh                   meshConfig
		xdsSocket, adminSocket string
		output                 string
	)
	cmd := &cobra.Command{
		Use:   "bootstrap",
		Short: "print the configuration to start the node's Envoy with",
		Long: "bootstrap prints Envoy's start configuration. Start Envoy 1.40 or later with it, with\n" +
			"--drain-time-s near the pods' grace period and --drain-strategy immediate.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if _, _, err := mesh.complete(); err != nil {
				return err
			}
			out, err := resource.Bootstrap(resource.BootstrapParams{
				NodeID: mesh.Node, Cluster: mesh.Domain, Locality: model.Locality{Region: mesh.Region, Zone: mesh.Zone},
				XDSSocket: xdsSocket, AdminSocket: adminSocket,
			})
			if err != nil {
				return err
			}
			if output != "" {
				return writeBootstrap(output, out, adminSocket)
			}
			_, err = s.out.Write(out)
			return err
		},
	}
	f := cmd.Flags()
	mesh.flags(f)
	f.StringVar(&xdsSocket, "xds-socket", defaultXDSSocket, "the registrar's xDS socket as Envoy sees it")
	f.StringVar(&adminSocket, "admin-path", defaultEnvoyAdmin, "where Envoy's admin interface listens")
	f.StringVar(&output, "output", "", "file to write it to, where no shell can redirect the output; the folder of --admin-path is made, too")
	return cmd
}

func writeBootstrap(path string, data []byte, adminSocket string) error {
	if err := os.WriteFile(path, data, 0o644); err != nil { //nolint:gosec // Envoy may run as another user; there is no secret in it
		return fmt.Errorf("write the configuration of Envoy: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(adminSocket), 0o700); err != nil {
		return fmt.Errorf("make the folder of Envoy's admin socket: %w", err)
	}
	return nil
}
