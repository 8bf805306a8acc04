package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/netconf"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/pin"
)

// add is ADD: it passes the previous result through and, for a pod of the mesh,
// returns only when the registrar has proven its listeners and its traffic is
// captured. Everything is checked before anything is changed; what fails later
// is undone (CNI-D4).
func (p *plugin) add(args *skel.CmdArgs) error {
	start := p.now()
	conf, err := netconf.Parse(args.StdinData)
	if err != nil {
		return err
	}
	netns, err := openPodNetns(args)
	if err != nil {
		return err
	}
	defer func() { _ = netns.Close() }()
	prev, err := conf.Previous()
	if err != nil {
		return err
	}
	cniArgs, err := netconf.ParseArgs(args.Args)
	if err != nil {
		return err
	}
	verdict, why := conf.Decide(cniArgs)
	log := p.log.With("container", args.ContainerID, "interface", args.IfName, "pod", cniArgs.Pod())
	if verdict != netconf.Pass {
		a := &attaching{
			plugin: p, log: log, conf: conf, netns: netns, deadline: start.Add(conf.Timeout),
			request: p.addRequest(args, conf, prev, cniArgs),
		}
		if err := a.run(verdict == netconf.Join); err != nil {
			return cniError(err)
		}
	} else {
		log.Info("passed through", "reason", why)
	}
	p.result = prev.Document
	return nil
}

// openPodNetns opens CNI_NETNS and refuses the plugin's own namespace before
// anything is done: the library compares only after we are done (C13, CNI-D6).
func openPodNetns(args *skel.CmdArgs) (*pin.Namespace, error) {
	netns, err := pin.Open(args.Netns)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, pin.ErrNotNamespace):
		return nil, types.NewError(types.ErrInvalidEnvironmentVariables,
			fmt.Sprintf("CNI_NETNS=%s is no network namespace: the runtime has to make the sandbox first", args.Netns), err.Error())
	case err != nil:
		return nil, types.NewError(types.ErrIOFailure, fmt.Sprintf("CNI_NETNS=%s cannot be opened", args.Netns), err.Error())
	}
	if err := refuseOwn(args, netns.ID); err != nil {
		return nil, errors.Join(err, netns.Close())
	}
	return netns, nil
}

// refuseOwn gives CNI code 8 for the plugin's own namespace, unless the runtime
// says that it means it.
func refuseOwn(args *skel.CmdArgs, id pin.ID) error {
	if args.NetnsOverride == "1" || strings.EqualFold(args.NetnsOverride, "true") {
		return nil
	}
	own, err := pin.Own()
	if err != nil {
		return types.NewError(types.ErrIOFailure, "own network namespace cannot be read: is /proc mounted?", err.Error())
	}
	if own == id {
		return types.NewError(types.ErrInvalidNetNS,
			fmt.Sprintf("CNI_NETNS=%s is the plugin's own network namespace: the mesh never captures the node", args.Netns), "")
	}
	return nil
}

// addRequest is what the registrar is told. Lists that no pod of a real runtime
// fills are cut at their limits, with a warning.
func (p *plugin) addRequest(args *skel.CmdArgs, conf netconf.Config, prev netconf.Previous, cniArgs netconf.Args) *cniv1.AddRequest {
	return &cniv1.AddRequest{
		Attachment:       &cniv1.Attachment{ContainerId: args.ContainerID, Ifname: args.IfName},
		Network:          conf.Name,
		Netns:            args.Netns,
		Addresses:        p.texts("addresses", prev.Addresses, cniv1.MaxAddresses),
		CniArgs:          cniArgs,
		Annotations:      conf.Annotations,
		AnnotationsKnown: conf.AnnotationsKnown,
		DnsServers:       p.texts("dns servers", prev.Nameservers, cniv1.MaxDNSServers),
		RuntimeNetns:     args.Netns,
	}
}

func (p *plugin) texts(what string, addrs []netip.Addr, most int) []string {
	if len(addrs) > most {
		p.log.Warn("only the first ones are used", "of", what, "given", len(addrs), "used", most)
		addrs = addrs[:most]
	}
	out := make([]string, len(addrs))
	for i, a := range addrs {
		out[i] = a.String()
	}
	return out
}
