package dnsv1

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/authority"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/api/limit"
)

// Validate checks every limit of one message on its own. What depends on the
// stream (the first message, growing revisions, totals) is the server's affair.
// The error is a *limit.FieldError.
func (x *SyncRequest) Validate() error {
	if n := proto.Size(x); n > MaxMessage {
		return limit.Errorf("message", "%d bytes, at most %d are allowed", n, MaxMessage)
	}
	if x.GetRevision() == 0 {
		return limit.Errorf("revision", "is 0")
	}
	if x.GetFull() && (len(x.GetRemoveNames()) > 0 || len(x.GetRemovePods()) > 0) {
		return limit.Errorf("full", "is true although the message removes something; a full state only sets")
	}
	if x.GetSettings() != nil {
		if err := x.GetSettings().Validate(); err != nil {
			return err
		}
	}
	if err := x.validateNames(); err != nil {
		return err
	}
	return x.validatePods()
}

func (x *SyncRequest) validateNames() error {
	err := limit.List("set_names", x.GetSetNames(), MaxChunkNames, func(field string, n *Name) error { return n.validate(field) })
	if err != nil {
		return err
	}
	return limit.List("remove_names", x.GetRemoveNames(), MaxChunkNames, checkName)
}

func (x *SyncRequest) validatePods() error {
	err := limit.List("set_pods", x.GetSetPods(), MaxChunkPods, func(field string, p *Pod) error { return p.validate(field) })
	if err != nil {
		return err
	}
	return limit.List("remove_pods", x.GetRemovePods(), MaxPods, checkAttachment)
}

// Validate checks domain and upstreams. The error is a *limit.FieldError.
func (x *Settings) Validate() error {
	if err := authority.ValidateDomain(x.GetMeshDomain()); err != nil {
		return limit.Errorf("settings.mesh_domain", "%v", err)
	}
	return checkUpstreams("settings.upstreams", x.GetUpstreams())
}

// Validate checks name and addresses. The error is a *limit.FieldError.
func (x *Name) Validate() error { return x.validate("name") }

func (x *Name) validate(field string) error {
	if err := checkName(field+".name", x.GetName()); err != nil {
		return err
	}
	if x.GetVip4() == "" && x.GetVip6() == "" {
		return limit.Errorf(field+".vip4", "neither vip4 nor vip6 of %q is given", x.GetName())
	}
	if err := checkVIP(field+".vip4", x.GetVip4(), true); err != nil {
		return err
	}
	return checkVIP(field+".vip6", x.GetVip6(), false)
}

// Validate checks key, path and upstreams. The error is a *limit.FieldError.
func (x *Pod) Validate() error { return x.validate("pod") }

func (x *Pod) validate(field string) error {
	if err := checkAttachment(field+".attachment", x.GetAttachment()); err != nil {
		return err
	}
	if err := limit.Bytes(field+".netns", x.GetNetns(), MaxPath); err != nil {
		return err
	}
	if !strings.HasPrefix(x.GetNetns(), "/") || strings.ContainsRune(x.GetNetns(), 0) {
		return limit.Errorf(field+".netns", "%q is no absolute path", x.GetNetns())
	}
	return checkUpstreams(field+".upstreams", x.GetUpstreams())
}

// checkAttachment holds the key to the rules of the contract that owns it.
func checkAttachment(field string, x *cniv1.Attachment) error {
	if err := x.Validate(); err != nil {
		return limit.Errorf(field, "%v", err)
	}
	return nil
}

// Validate checks what the server reports. The error is a *limit.FieldError.
func (x *SyncResponse) Validate() error {
	return limit.List("pods", x.GetPods(), MaxChunkPods, func(field string, p *PodStatus) error {
		if err := checkAttachment(field+".attachment", p.GetAttachment()); err != nil {
			return err
		}
		if err := limit.Bytes(field+".error", p.GetError(), MaxError); err != nil {
			return err
		}
		return limit.Bytes(field+".capture_error", p.GetCaptureError(), MaxError)
	})
}

// Validate checks a whole table, as it is read from disk: the limits of every
// entry, the totals, and that no key occurs twice. The error is a *limit.FieldError.
func (x *Table) Validate() error {
	if err := x.GetSettings().Validate(); err != nil {
		return err
	}
	if err := limit.Count("names", len(x.GetNames()), MaxNames); err != nil {
		return err
	}
	names := make(map[string]struct{}, len(x.GetNames()))
	for i, n := range x.GetNames() {
		field := fmt.Sprintf("names[%d]", i)
		if err := n.validate(field); err != nil {
			return err
		}
		names[n.GetName()] = struct{}{}
		if len(names) != i+1 {
			return limit.Errorf(field, "%q occurs twice", n.GetName())
		}
	}
	if err := limit.Count("pods", len(x.GetPods()), MaxPods); err != nil {
		return err
	}
	pods := make(map[string]struct{}, len(x.GetPods()))
	for i, p := range x.GetPods() {
		field := fmt.Sprintf("pods[%d]", i)
		if err := p.validate(field); err != nil {
			return err
		}
		key := p.GetAttachment().GetContainerId() + "-" + p.GetAttachment().GetIfname()
		pods[key] = struct{}{}
		if len(pods) != i+1 {
			return limit.Errorf(field, "%q occurs twice", key)
		}
	}
	return nil
}
