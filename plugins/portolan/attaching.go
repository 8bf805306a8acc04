package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/client"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/netconf"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/pin"
)

// undoReserve is the part of a command's time that is kept for undoing.
const undoReserve = 500 * time.Millisecond

// attaching is one ADD of a pod that the registrar decides about.
type attaching struct {
	plugin   *plugin
	log      *slog.Logger
	conf     netconf.Config
	netns    *pin.Namespace
	request  *cniv1.AddRequest
	deadline time.Time // of the whole command

	registrar *client.Client // open until everything is undone

	// undo is run in reverse when the pod does not end up in the mesh.
	undo []func() error
}

// run attaches the pod, or leaves no trace of it. A pod that must join fails
// when the registrar is away; any other starts unmeshed, with a note for the
// registrar (contract 5, CNI-D10).
func (a *attaching) run(must bool) error {
	var err error
	if a.registrar, err = client.New(a.conf.Socket); err != nil {
		return err
	}
	defer func() { _ = a.registrar.Close() }()
	meshed := false
	defer func() { // also when something panics
		if !meshed {
			a.revert()
		}
	}()
	if err := a.request.Validate(); err != nil {
		if must {
			return types.NewError(types.ErrInvalidNetworkConfig, "pod cannot be described to the registrar: "+err.Error(), "")
		}
		a.log.Error("starts unmeshed: the pod cannot be described to the registrar", "error", err)
		return nil
	}
	decided, err := a.attach(must)
	if err == nil {
		meshed = decided.GetMeshed()
		a.log.Info("attached", "meshed", meshed, "reason", decided.GetReason())
		return nil
	}
	// Once the registrar said that the pod is in the mesh, or refused it, the
	// pod's own word does not matter any more.
	failure, ok := errors.AsType[*client.Failure](err)
	if must || decided.GetMeshed() || ok && failure.Refused() || !ok && !errors.Is(err, errNotPinned) {
		return err
	}
	a.log.Warn("starts unmeshed: the registrar is away", "error", err)
	a.revert()
	a.leaveNote()
	return nil
}

// errNotPinned marks a pod that could not be prepared for the registrar at all.
var errNotPinned = errors.New("network namespace is not pinned")

// attach pins the namespace, asks the registrar, and captures a meshed pod's
// traffic while the registrar proves its listeners. The decision is returned even
// with an error, nil before it is known.
func (a *attaching) attach(must bool) (*cniv1.AddResponse, error) {
	if err := a.pin(); err != nil {
		return nil, err
	}
	failpoint("pinned")
	ctx, cancel := context.WithDeadline(context.Background(), a.deadline.Add(-a.reserve()))
	defer cancel()
	a.undo = append(a.undo, a.forget)
	adding, err := a.registrar.Add(ctx, a.request, must)
	if err != nil {
		return nil, err
	}
	if !adding.Decision.GetMeshed() {
		// The registrar keeps nothing of this pod: there is nothing to tell it.
		a.undo = a.undo[:len(a.undo)-1]
		return adding.Decision, nil
	}
	failpoint("decided")
	err = a.captureWhileProven(adding, cancel)
	failpoint("proven")
	return adding.Decision, err
}

// captureWhileProven programs the capture beside waiting for the proof. The first
// of the two that fails ends the other, and both are over when it returns.
func (a *attaching) captureWhileProven(adding *client.Adding, cancel context.CancelFunc) error {
	cfg, err := capture.FromProto(adding.Decision.GetCapture())
	if err != nil {
		return err
	}
	netns := a.request.GetNetns()
	captured := make(chan error, 1)
	a.undo = append(a.undo, func() error { return a.plugin.capture.Remove(netns) })
	begin := a.plugin.now()
	go func() {
		err := safely(func() error { return a.plugin.capture.Start(netns, cfg) })
		if err != nil {
			cancel() // do not wait for a proof that does not help
		}
		captured <- err
	}()
	proof := adding.Proven()
	if err := <-captured; err != nil {
		return err
	}
	// The mesh DNS, whose sockets are open by the proof, keeps the redirection alive,
	// but may begin with it after ADD has returned. The pod's first query must not slip
	// past: an application remembers an NXDOMAIN.
	if proof == nil && cfg.DNS && a.plugin.now().Sub(begin) > capture.AliveTimeout/2 {
		return safely(func() error { return a.plugin.capture.RedirectDNS(netns) })
	}
	return proof
}

// pin leaves the note beside the pin, and then the pin: a pin without a note
// could not be told from a stranger's, a note without a pin is swept as a pod
// that is gone. Notes of an earlier attempt would undo this one later, so they go.
func (a *attaching) pin() error {
	key := a.request.GetAttachment()
	base, err := spool.Base(key)
	if err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, err.Error(), "")
	}
	if isStrangers(a.conf, key) {
		return types.NewError(client.CodeConflict,
			fmt.Sprintf("pin %s belongs to another container and interface: delete that one first", pin.Path(a.conf.NetnsDir, base)), "")
	}
	if err := pin.Prepare(a.conf.NetnsDir); err != nil {
		return fmt.Errorf("%w: %w", errNotPinned, err)
	}
	for _, kind := range []spool.Kind{spool.Deleted, spool.Unmeshed} {
		if err := removeNote(a.conf.SpoolDir, key, kind); err != nil {
			return fmt.Errorf("%w: %w", errNotPinned, err)
		}
	}
	runtimePath := a.request.GetNetns()
	a.request.Netns = pin.Path(a.conf.NetnsDir, base)
	a.undo = append(a.undo, func() error {
		a.request.Netns = runtimePath
		return errors.Join(pin.Unpin(a.conf.NetnsDir, base), removeNote(a.conf.NetnsDir, key, spool.Attached))
	})
	if err := a.plugin.writeNote(a.conf.NetnsDir, &cniv1.Note{What: &cniv1.Note_Attached{Attached: a.request}}); err != nil {
		return fmt.Errorf("%w: %w", errNotPinned, err)
	}
	failpoint("noted")
	if _, err := pin.Pin(a.conf.NetnsDir, base, a.netns); err != nil {
		return fmt.Errorf("%w: %w", errNotPinned, err)
	}
	return nil
}

// forget tells a registrar that may have stored the pod that it is not there; if
// that fails, a note does. It has the reserve for itself.
func (a *attaching) forget() error {
	if !a.registrar.Connected() {
		return nil
	}
	ctx, cancel := context.WithDeadline(context.Background(), a.deadline.Add(-a.reserve()/5))
	defer cancel()
	request := &cniv1.DelRequest{Attachment: a.request.GetAttachment(), Network: a.request.GetNetwork()}
	_, err := a.registrar.Del(ctx, request)
	if err == nil {
		return nil
	}
	return errors.Join(err, a.plugin.writeNote(a.conf.SpoolDir, &cniv1.Note{What: &cniv1.Note_Deleted{Deleted: request}}))
}

// revert undoes what was done, the last first. What cannot be undone is logged:
// the runtime's DEL comes and tries again.
func (a *attaching) revert() {
	for len(a.undo) > 0 {
		last := a.undo[len(a.undo)-1]
		a.undo = a.undo[:len(a.undo)-1]
		if err := safely(last); err != nil {
			a.log.Warn("undo", "error", err)
		}
	}
}

// leaveNote tells the registrar of a pod that started without it.
func (a *attaching) leaveNote() {
	err := a.plugin.writeNote(a.conf.SpoolDir, &cniv1.Note{What: &cniv1.Note_Unmeshed{Unmeshed: a.request}})
	if err != nil {
		a.log.Error("the registrar cannot be told of an unmeshed pod", "error", err)
	}
}

// reserve is the part of this command's time that undoing gets.
func (a *attaching) reserve() time.Duration { return min(undoReserve, a.conf.Timeout/4) }
