package dnsv1

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/portolan-mesh/portolan/api/authority"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
)

// Validate checks every limit of one message on its own. What depends on the
// stream (the first message, growing revisions, totals) is the server's affair.
// The error is a *FieldError.
func (x *SyncRequest) Validate() error {
	if n := proto.Size(x); n > MaxMessage {
		return fieldErrorf("message", "%d bytes, at most %d are allowed", n, MaxMessage)
	}
	if x.GetRevision() == 0 {
		return fieldErrorf("revision", "is 0")
	}
	if x.GetFull() && (len(x.GetRemoveNames()) > 0 || len(x.GetRemovePods()) > 0) {
		return fieldErrorf("full", "is true although the message removes something; a full state only sets")
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
	if err := checkCount("set_names", len(x.GetSetNames()), MaxChunkNames); err != nil {
		return err
	}
	for i, n := range x.GetSetNames() {
		if err := n.validate(fmt.Sprintf("set_names[%d]", i)); err != nil {
			return err
		}
	}
	if err := checkCount("remove_names", len(x.GetRemoveNames()), MaxChunkNames); err != nil {
		return err
	}
	for i, n := range x.GetRemoveNames() {
		if err := checkName(fmt.Sprintf("remove_names[%d]", i), n); err != nil {
			return err
		}
	}
	return nil
}

func (x *SyncRequest) validatePods() error {
	if err := checkCount("set_pods", len(x.GetSetPods()), MaxChunkPods); err != nil {
		return err
	}
	for i, p := range x.GetSetPods() {
		if err := p.validate(fmt.Sprintf("set_pods[%d]", i)); err != nil {
			return err
		}
	}
	if err := checkCount("remove_pods", len(x.GetRemovePods()), MaxPods); err != nil {
		return err
	}
	for i, a := range x.GetRemovePods() {
		if err := checkAttachment(fmt.Sprintf("remove_pods[%d]", i), a); err != nil {
			return err
		}
	}
	return nil
}

// Validate checks domain and upstreams. The error is a *FieldError.
func (x *Settings) Validate() error {
	if err := authority.ValidateDomain(x.GetMeshDomain()); err != nil {
		return fieldErrorf("settings.mesh_domain", "%v", err)
	}
	return checkUpstreams("settings.upstreams", x.GetUpstreams())
}

// Validate checks name and addresses. The error is a *FieldError.
func (x *Name) Validate() error { return x.validate("name") }

func (x *Name) validate(field string) error {
	if err := checkName(field+".name", x.GetName()); err != nil {
		return err
	}
	if x.GetVip4() == "" && x.GetVip6() == "" {
		return fieldErrorf(field+".vip4", "neither vip4 nor vip6 of %q is given", x.GetName())
	}
	if err := checkVIP(field+".vip4", x.GetVip4(), true); err != nil {
		return err
	}
	return checkVIP(field+".vip6", x.GetVip6(), false)
}

// Validate checks key, path and upstreams. The error is a *FieldError.
func (x *Pod) Validate() error { return x.validate("pod") }

func (x *Pod) validate(field string) error {
	if err := checkAttachment(field+".attachment", x.GetAttachment()); err != nil {
		return err
	}
	if err := checkBytes(field+".netns", x.GetNetns(), MaxPath); err != nil {
		return err
	}
	if !strings.HasPrefix(x.GetNetns(), "/") || strings.ContainsRune(x.GetNetns(), 0) {
		return fieldErrorf(field+".netns", "%q is no absolute path", x.GetNetns())
	}
	return checkUpstreams(field+".upstreams", x.GetUpstreams())
}

// checkAttachment holds the key to the rules of the contract that owns it.
func checkAttachment(field string, x *cniv1.Attachment) error {
	if err := x.Validate(); err != nil {
		return fieldErrorf(field, "%v", err)
	}
	return nil
}

// Validate checks what the server reports. The error is a *FieldError.
func (x *SyncResponse) Validate() error {
	if err := checkCount("pods", len(x.GetPods()), MaxChunkPods); err != nil {
		return err
	}
	for i, p := range x.GetPods() {
		field := fmt.Sprintf("pods[%d]", i)
		if err := checkAttachment(field+".attachment", p.GetAttachment()); err != nil {
			return err
		}
		if err := checkBytes(field+".error", p.GetError(), MaxError); err != nil {
			return err
		}
		if err := checkBytes(field+".capture_error", p.GetCaptureError(), MaxError); err != nil {
			return err
		}
	}
	return nil
}

// Validate checks a whole table, as it is read from disk: the limits of every
// entry, the totals, and that no key occurs twice. The error is a *FieldError.
func (x *Table) Validate() error {
	if err := x.GetSettings().Validate(); err != nil {
		return err
	}
	if err := checkCount("names", len(x.GetNames()), MaxNames); err != nil {
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
			return fieldErrorf(field, "%q occurs twice", n.GetName())
		}
	}
	if err := checkCount("pods", len(x.GetPods()), MaxPods); err != nil {
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
			return fieldErrorf(field, "%q occurs twice", key)
		}
	}
	return nil
}
