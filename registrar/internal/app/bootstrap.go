package app

import (
	"github.com/spf13/cobra"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

func newBootstrapCommand(s streams) *cobra.Command {
	var (
		mesh                   meshConfig
		xdsSocket, adminSocket string
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
			_, err = s.out.Write(out)
			return err
		},
	}
	f := cmd.Flags()
	mesh.flags(f)
	f.StringVar(&xdsSocket, "xds-socket", defaultXDSSocket, "the registrar's xDS socket as Envoy sees it")
	f.StringVar(&adminSocket, "admin-path", defaultEnvoyAdmin, "where Envoy's admin interface listens")
	return cmd
}
