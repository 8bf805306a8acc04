package main

import (
	"context"
	"errors"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/portolan-mesh/portolan/plugins/portolan/internal/client"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/netconf"
)

// maxStatus leaves a tenth of the second that STATUS may take for the rest of the
// process (CNI-33).
const maxStatus = 900 * time.Millisecond

// status is STATUS: could an ADD succeed now? One of a pod outside the mesh always
// could, and on an error runtimes turn the whole node NotReady: no pod starts there
// any more, those of bypassed namespaces neither, and the node is drained. So only
// reportStatus makes it ask, where every pod is of the mesh (CNI-D12). It takes no lock
// and has no side effect (C21).
func (p *plugin) status(args *skel.CmdArgs) error {
	conf, err := netconf.Parse(args.StdinData)
	if err != nil {
		return err
	}
	if !conf.ReportStatus {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(maxStatus, conf.Timeout))
	defer cancel()
	registrar, err := client.New(conf.Socket)
	if err != nil {
		return cniError(err)
	}
	defer func() { _ = registrar.Close() }()
	answer, err := registrar.Status(ctx)
	if failure, ok := errors.AsType[*client.Failure](err); ok {
		e := failure.CNI()
		return types.NewError(types.ErrPluginNotAvailable, e.Msg, e.Details)
	}
	switch {
	case answer.GetReady():
		return nil
	case answer.GetLimited():
		return types.NewError(types.ErrLimitedConnectivity, "registrar is not ready, running pods are affected: "+answer.GetReason(), "")
	default:
		return types.NewError(types.ErrPluginNotAvailable, "registrar is not ready: "+answer.GetReason(), "")
	}
}
