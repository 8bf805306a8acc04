package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/client"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/netconf"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/pin"
)

const (
	// checkAttempts and checkPause give the registrar time to bring the TCP ports
	// of a pod up to what it just answered (C18).
	checkAttempts = 5
	checkPause    = 100 * time.Millisecond
)

// checking is one CHECK.
type checking struct {
	plugin *plugin
	conf   netconf.Config
	args   *skel.CmdArgs
	key    *cniv1.Attachment
	base   string // of the pin's name
	netns  *pin.Namespace
	// attached is true when ADD attached the pod, expected when its annotations
	// ask for the mesh.
	attached, expected bool
}

// check is CHECK: the registrar knows the pod, its namespace is pinned, and the
// rules in it are those that the registrar wants (C18). A pod that was passed
// through or started unmeshed is fine as it is.
func (p *plugin) check(args *skel.CmdArgs) error {
	deadline := p.now()
	conf, err := netconf.Parse(args.StdinData)
	if err != nil {
		return err
	}
	deadline = deadline.Add(conf.Timeout)
	if _, err := conf.Previous(); err != nil {
		return err
	}
	netns, err := openPodNetns(args)
	if err != nil {
		return err
	}
	defer func() { _ = netns.Close() }()
	cniArgs, err := netconf.ParseArgs(args.Args)
	if err != nil {
		return err
	}
	c := &checking{
		plugin: p, conf: conf, args: args, netns: netns,
		key: &cniv1.Attachment{ContainerId: args.ContainerID, Ifname: args.IfName},
	}
	if c.base, err = spool.Base(c.key); err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, err.Error(), "")
	}
	verdict, _ := conf.Decide(cniArgs)
	c.expected, c.attached = verdict == netconf.Join, isAttached(conf, c.key)
	if verdict == netconf.Pass && !c.attached {
		return nil
	}
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	if err := c.run(ctx); err != nil {
		return cniError(err)
	}
	return nil
}

func (c *checking) run(ctx context.Context) error {
	answer, err := c.ask(ctx)
	if failure, ok := errors.AsType[*client.Failure](err); ok {
		unknown := status.Code(failure.Err) == codes.NotFound
		if !c.attached && !c.expected && (unknown || !failure.Refused()) {
			return nil // started unmeshed, as the policy says
		}
	}
	if err != nil || !answer.GetMeshed() {
		return err
	}
	if c.attached {
		path := pin.Path(c.conf.NetnsDir, c.base)
		if id, err := pin.Identify(path); err != nil || id != c.netns.ID {
			return types.NewError(client.CodeRulesMissing,
				fmt.Sprintf("pin %s is missing or leads elsewhere: delete the pod, it is made again", path), "")
		}
	}
	cfg, err := capture.FromProto(answer.GetCapture())
	if err != nil {
		return err
	}
	return c.verify(ctx, cfg)
}

func (c *checking) ask(ctx context.Context) (*cniv1.CheckResponse, error) {
	registrar, err := client.New(c.conf.Socket)
	if err != nil {
		return nil, err
	}
	defer func() { _ = registrar.Close() }()
	return registrar.Check(ctx, &cniv1.CheckRequest{Attachment: c.key})
}

// verify compares the rules; TCP ports that are not there yet get a moment.
func (c *checking) verify(ctx context.Context, cfg capture.Config) error {
	for attempt := 1; ; attempt++ {
		err := c.plugin.capture.Verify(c.netns.Path(), cfg)
		missing, ok := errors.AsType[*capture.MissingError](err)
		if !ok {
			return err
		}
		missing.NetNS = c.args.Netns
		if missing.Kind != "element" || attempt == checkAttempts || !pause(ctx, checkPause) {
			return missing
		}
	}
}

// pause waits, and reports false when ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
