package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/plugins/portolan/internal/client"
)

// release is what the plugin was built as; the linker sets it. Without
// a command, so also for --version, the plugin prints it beside the versions of the
// specification that it speaks.
var release = "dev" //nolint:gochecknoglobals // set by -ldflags -X, never by code

// capturer programs a pod's namespace.
type capturer interface {
	// Start captures, DNS for the first capture.AliveTimeout.
	Start(netns string, cfg capture.Config) error
	Verify(netns string, cfg capture.Config) error
	Remove(netns string) error
	// RedirectDNS captures DNS for another capture.AliveTimeout.
	RedirectDNS(netns string) error
}

// plugin is one run of one command.
type plugin struct {
	log     *slog.Logger
	capture capturer
	now     func() time.Time

	// result is what a successful command prints; empty for all but ADD and VERSION.
	result []byte
	// configVersion is the configuration's version once it is known, for error documents.
	configVersion string
	// settled is true once DEL did its work: whatever skel finds afterwards does
	// not fail it (CNI-D6, I10).
	settled bool
}

// supported lists the versions of the specification that the plugin speaks.
func supported() version.PluginInfo {
	return version.PluginSupports("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
}

// main runs the command, writes at most one document to stdout and returns the
// exit code (C1, I12).
func (p *plugin) main(command string, stdout io.Writer) int {
	failure := p.execute(command)
	document := p.result
	if failure != nil {
		document = p.errorDocument(failure)
	}
	failpoint("print")
	if len(document) > 0 {
		if _, err := stdout.Write(append(bytes.TrimSpace(document), '\n')); err != nil {
			p.log.Error("result cannot be written", "error", err)
			return 1
		}
	}
	if failure != nil {
		return 1
	}
	return 0
}

// execute runs the command; a panic becomes an error document with the stack in
// the log (CNI-40).
func (p *plugin) execute(command string) (failure *types.Error) {
	defer func() {
		if cause := recover(); cause != nil {
			p.log.Error("panic", "cause", cause, "stack", string(debug.Stack()))
			failure = types.NewError(types.ErrInternal, fmt.Sprintf("portolan panicked: %v: please report it", cause), "the stack is on standard error")
			if p.settled { // DEL does not fail, whatever happens (I10)
				failure = nil
			}
		}
	}()
	if command == "VERSION" { // skel would print to the guarded descriptor
		var out bytes.Buffer
		if err := supported().Encode(&out); err != nil {
			return types.NewError(types.ErrIOFailure, err.Error(), "")
		}
		p.result = out.Bytes()
		return nil
	}
	failure = skel.PluginMainFuncsWithError(skel.CNIFuncs{
		Add: p.remember(p.add), Del: p.remember(p.del), Check: p.remember(p.check), GC: p.remember(p.gc), Status: p.remember(p.status),
	}, supported(), "CNI plugin portolan "+release+": puts pods into the mesh; it is run by a container runtime")
	if failure != nil && p.settled {
		p.log.Warn("ignored after DEL did its work", "code", failure.Code, "message", failure.Msg)
		return nil
	}
	return failure
}

// remember notes the configuration's version before it runs a command.
func (p *plugin) remember(command func(*skel.CmdArgs) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		v, err := (&version.ConfigDecoder{}).Decode(args.StdinData)
		if err != nil {
			return types.NewError(types.ErrDecodingFailure, err.Error(), "")
		}
		p.configVersion = v
		return command(args)
	}
}

// errorDocument is the specification's error, which the library's type prints
// without its version.
func (p *plugin) errorDocument(e *types.Error) []byte {
	document, err := json.MarshalIndent(struct {
		CNIVersion string `json:"cniVersion,omitempty"`
		Code       uint   `json:"code"`
		Msg        string `json:"msg"`
		Details    string `json:"details,omitempty"`
	}{p.configVersion, e.Code, e.Msg, e.Details}, "", "    ")
	if err != nil { // texts and numbers cannot fail to marshal
		p.log.Error("error document", "error", err)
		return nil
	}
	return document
}

// cniError turns what went wrong in a command into a CNI error.
func cniError(err error) *types.Error {
	if e, ok := errors.AsType[*types.Error](err); ok {
		return e
	}
	if f, ok := errors.AsType[*client.Failure](err); ok {
		return f.CNI()
	}
	if f, ok := errors.AsType[*capture.FeatureError](err); ok {
		return types.NewError(client.CodeKernelFeature, f.Error(), err.Error())
	}
	if m, ok := errors.AsType[*capture.MissingError](err); ok {
		return types.NewError(client.CodeRulesMissing, m.Error(), "")
	}
	return types.NewError(types.ErrIOFailure, err.Error(), "")
}

// safely runs fn and turns a panic in it into an error: a goroutine's panic
// would end the process without a document.
func safely(fn func() error) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = types.NewError(types.ErrInternal, fmt.Sprintf("portolan panicked: %v: please report it", cause), string(debug.Stack()))
		}
	}()
	return fn()
}
