package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/client"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/netconf"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/pin"
)

// maxDel bounds DEL whatever the configuration says: the runtime holds the pod's
// address until the whole chain is deleted.
const maxDel = 5 * time.Second

// del is DEL. It always succeeds: an error would keep the plugins before us from
// being called and leak an address per retry (CNI-D1, I10). What the registrar
// cannot be told is left as a note; when not even a note can be written, the
// attached note stays, whose pin is gone, and the registrar sweeps it as a ghost.
// It needs neither prevResult nor CNI_NETNS nor a valid configuration (C14, C16).
func (p *plugin) del(args *skel.CmdArgs) error {
	p.settled = true
	log := p.log.With("container", args.ContainerID, "interface", args.IfName)
	conf, err := netconf.Parse(args.StdinData)
	if err != nil {
		log.Warn("configuration: defaults are used", "error", err)
	}
	key := &cniv1.Attachment{ContainerId: args.ContainerID, Ifname: args.IfName}
	if _, err := spool.Base(key); err != nil {
		log.Warn("nothing of ours can be attached under this name", "error", err)
		return nil
	}
	if neverAttached(args, conf, key) {
		return nil
	}
	request := &cniv1.DelRequest{Attachment: key, Network: conf.Name}
	answer, told := p.tell(conf, request)
	if told != nil {
		log.Warn("the registrar is told later", "error", told)
		told = p.writeNote(conf.SpoolDir, &cniv1.Note{What: &cniv1.Note_Deleted{Deleted: request}})
	}
	p.detach(log, conf, key, answer.GetCaptureRemoved(), told == nil)
	if told != nil {
		log.Error("the registrar cannot be told, it finds out by the missing pin", "error", told)
	}
	return nil
}

// neverAttached reports whether this DEL is of a pod that is passed through and
// left nothing here, so that nobody has to be told. Any doubt is false.
func neverAttached(args *skel.CmdArgs, conf netconf.Config, key *cniv1.Attachment) bool {
	cniArgs, err := netconf.ParseArgs(args.Args)
	if err != nil {
		return false
	}
	verdict, _ := conf.Decide(cniArgs)
	return verdict == netconf.Pass && !isAttached(conf, key)
}

// tell delivers a DEL to the registrar. An error is one that a note can mend.
func (p *plugin) tell(conf netconf.Config, request *cniv1.DelRequest) (*cniv1.DelResponse, error) {
	registrar, err := client.New(conf.Socket)
	if err != nil {
		return nil, err
	}
	defer func() { _ = registrar.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), min(conf.Timeout, maxDel)-undoReserve)
	defer cancel()
	return registrar.Del(ctx, request)
}

// detach takes away what ADD left here, except for a capture that the registrar
// removed: a socket of ours to nftables would wait for the grace period of that. All of
// it is tried whatever fails; the attached note goes last, and only when the registrar
// is or will be told.
func (p *plugin) detach(log *slog.Logger, conf netconf.Config, key *cniv1.Attachment, uncaptured, forget bool) {
	base, err := spool.Base(key)
	if err != nil || isStrangers(conf, key) {
		return
	}
	var errs []error
	if !uncaptured {
		// By the pin, never by CNI_NETNS: that path may mean another pod or the
		// node by now (CNI-D6).
		errs = append(errs, p.capture.Remove(pin.Path(conf.NetnsDir, base)))
	}
	errs = append(errs, pin.Unpin(conf.NetnsDir, base), removeNote(conf.SpoolDir, key, spool.Unmeshed))
	if forget {
		errs = append(errs, removeNote(conf.NetnsDir, key, spool.Attached))
	}
	if err := errors.Join(errs...); err != nil {
		log.Warn("something of the pod is left", "error", err)
	}
}
