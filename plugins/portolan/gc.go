package main

import (
	"context"
	"errors"
	"io/fs"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/client"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/netconf"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/pin"
)

// gc is GC (C19). Without a list it does nothing: an absent list is a runtime of
// another spelling, not a runtime without pods (CNI-30). With one it tells the
// registrar, and sweeps what a DEL that never came left here: attachments of this
// network that are not in the list and whose namespace the runtime removed. It
// goes on after errors and reports them at the end.
func (p *plugin) gc(args *skel.CmdArgs) error {
	conf, err := netconf.Parse(args.StdinData)
	if err != nil {
		return err
	}
	if !conf.LiveKnown {
		p.log.Info("no list of live attachments, nothing is collected")
		return nil
	}
	live, err := liveKeys(conf.Live)
	if err != nil {
		return err
	}
	told := p.tellGC(conf, live)
	swept, err := p.sweep(conf, live)
	if told != nil {
		// The registrar did not hear that these are gone.
		for _, key := range swept {
			note := &cniv1.Note{What: &cniv1.Note_Deleted{Deleted: &cniv1.DelRequest{Attachment: key, Network: conf.Name}}}
			err = errors.Join(err, p.writeNote(conf.SpoolDir, note))
		}
	}
	if told != nil {
		return cniError(told)
	}
	if err != nil {
		return types.NewError(types.ErrIOFailure, "not everything could be collected", err.Error())
	}
	return nil
}

// liveKeys checks the runtime's list; a key is in it once.
func liveKeys(list []types.GCAttachment) ([]*cniv1.Attachment, error) {
	seen := make(map[types.GCAttachment]bool, len(list))
	var out []*cniv1.Attachment
	for _, a := range list {
		if seen[a] {
			continue
		}
		seen[a] = true
		key := &cniv1.Attachment{ContainerId: a.ContainerID, Ifname: a.IfName}
		if err := key.Validate(); err != nil {
			return nil, types.NewError(types.ErrInvalidNetworkConfig, "list of live attachments: "+err.Error(), "")
		}
		out = append(out, key)
	}
	return out, nil
}

func (p *plugin) tellGC(conf netconf.Config, live []*cniv1.Attachment) error {
	request := &cniv1.GCRequest{Network: conf.Name, Valid: live}
	if err := request.Validate(); err != nil {
		return types.NewError(types.ErrInvalidNetworkConfig, "list of live attachments: "+err.Error(), "")
	}
	registrar, err := client.New(conf.Socket)
	if err != nil {
		return err
	}
	defer func() { _ = registrar.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), conf.Timeout)
	defer cancel()
	answer, err := registrar.GC(ctx, request)
	if err == nil {
		p.log.Info("registrar collected", "removed", len(answer.GetRemoved()))
	}
	return err
}

// sweep takes away the pins and notes of stale attachments and returns the keys
// of those that were attached.
func (p *plugin) sweep(conf netconf.Config, live []*cniv1.Attachment) ([]*cniv1.Attachment, error) {
	keep := make(map[string]bool, len(live))
	for _, key := range live {
		if base, err := spool.Base(key); err == nil {
			keep[base] = true
		}
	}
	attached, err := p.sweepFolder(conf, conf.NetnsDir, spool.Attached, keep)
	_, unmeshedErr := p.sweepFolder(conf, conf.SpoolDir, spool.Unmeshed, keep)
	return attached, errors.Join(err, unmeshedErr)
}

// sweepFolder takes away the notes of one kind in dir, and their pins, that are
// of this network, not to keep, and about a namespace that is gone.
func (p *plugin) sweepFolder(conf netconf.Config, dir string, kind spool.Kind, keep map[string]bool) ([]*cniv1.Attachment, error) {
	entries, err := spool.Scan(dir)
	errs := []error{err}
	var swept []*cniv1.Attachment
	for _, e := range entries {
		add := e.Note.GetAttached()
		if kind == spool.Unmeshed {
			add = e.Note.GetUnmeshed()
		}
		base, err := spool.Base(e.Note.Key())
		if err != nil || e.Kind != kind || add.GetNetwork() != conf.Name || keep[base] || !runtimeForgot(conf, base, add) {
			continue
		}
		p.log.Info("collected: the runtime has neither the attachment nor its network namespace", "note", e.Name, "netns", add.GetRuntimeNetns())
		if err := errors.Join(pin.Unpin(conf.NetnsDir, base), spool.Remove(dir, e.Name)); err != nil {
			errs = append(errs, err)
			continue
		}
		swept = append(swept, add.GetAttachment())
	}
	return swept, errors.Join(errs...)
}

// runtimeForgot reports whether the namespace that the runtime made for an
// attachment is gone: its path leads nowhere, or to another namespace than the
// pin. The pin itself keeps the namespace alive and says nothing.
func runtimeForgot(conf netconf.Config, base string, add *cniv1.AddRequest) bool {
	runtime, err := pin.Identify(add.GetRuntimeNetns())
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, pin.ErrNotNamespace)
	}
	pinned, err := pin.Identify(pin.Path(conf.NetnsDir, base))
	return err == nil && pinned != runtime
}
