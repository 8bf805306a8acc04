package cniv1

import (
	"fmt"

	"github.com/portolan-mesh/portolan/api/limit"
)

// Validate checks the key of an attachment (C3 of the CNI checklist): what
// passes is safe as part of a file name. The error is a *limit.FieldError.
func (x *Attachment) Validate() error { return x.validate("attachment") }

func (x *Attachment) validate(field string) error {
	if x == nil {
		return limit.Errorf(field, "is missing")
	}
	if err := limit.Bytes(field+".container_id", x.GetContainerId(), MaxContainerID); err != nil {
		return err
	}
	if !isName(x.GetContainerId()) {
		return limit.Errorf(field+".container_id", "%q does not match ^[a-zA-Z0-9][a-zA-Z0-9_.-]*$", x.GetContainerId())
	}
	if err := limit.Bytes(field+".ifname", x.GetIfname(), MaxIfName); err != nil {
		return err
	}
	if !isIfName(x.GetIfname()) {
		return limit.Errorf(field+".ifname", "%q is no interface name (no slash, colon or blank, ASCII)", x.GetIfname())
	}
	return nil
}

// Validate checks every limit of an AddRequest. The error is a *limit.FieldError.
func (x *AddRequest) Validate() error {
	return limit.First(
		func() error { return x.GetAttachment().validate("attachment") },
		func() error { return checkNetwork("network", x.GetNetwork()) },
		func() error { return checkPath("netns", x.GetNetns()) },
		func() error { return checkAddresses("addresses", x.GetAddresses(), 1, MaxAddresses) },
		x.validateArgs,
		x.validateAnnotations,
		func() error { return checkAddresses("dns_servers", x.GetDnsServers(), 0, MaxDNSServers) },
		func() error { return limit.Bytes("runtime_netns", x.GetRuntimeNetns(), MaxPath) },
	)
}

func (x *AddRequest) validateArgs() error {
	if err := limit.Count("cni_args", len(x.GetCniArgs()), MaxCNIArgs); err != nil {
		return err
	}
	for k, v := range x.GetCniArgs() {
		if k == "" {
			return limit.Errorf("cni_args", "an empty key")
		}
		if err := limit.Bytes(fmt.Sprintf("cni_args key %.64q", k), k, MaxCNIArgKey); err != nil {
			return err
		}
		if err := limit.Bytes(fmt.Sprintf("cni_args[%q]", k), v, MaxCNIArgValue); err != nil {
			return err
		}
	}
	return nil
}

func (x *AddRequest) validateAnnotations() error {
	if err := limit.Count("annotations", len(x.GetAnnotations()), MaxAnnotations); err != nil {
		return err
	}
	if len(x.GetAnnotations()) > 0 && !x.GetAnnotationsKnown() {
		return limit.Errorf("annotations", "%d entries although annotations_known is false", len(x.GetAnnotations()))
	}
	total := 0
	for k, v := range x.GetAnnotations() {
		if k == "" {
			return limit.Errorf("annotations", "an empty key")
		}
		if err := limit.Bytes(fmt.Sprintf("annotations key %.64q", k), k, MaxAnnotationKey); err != nil {
			return err
		}
		total += len(k) + len(v)
	}
	if total > MaxAnnotationsTotal {
		return limit.Errorf("annotations", "%d bytes in total, at most %d are allowed", total, MaxAnnotationsTotal)
	}
	return nil
}

func checkAddresses(field string, addrs []string, least, most int) error {
	if len(addrs) < least {
		return limit.Errorf(field, "%d entries, at least %d is needed", len(addrs), least)
	}
	return limit.List(field, addrs, most, checkAddress)
}

// Validate checks every limit of an AddResponse: a meshed pod has a capture, an
// unmeshed one has none. The error is a *limit.FieldError.
func (x *AddResponse) Validate() error {
	if err := limit.Bytes("reason", x.GetReason(), MaxReason); err != nil {
		return err
	}
	return validateDecision(x.GetMeshed(), x.GetCapture())
}

// Validate checks every limit of a CheckResponse, as AddResponse. The error is a *limit.FieldError.
func (x *CheckResponse) Validate() error { return validateDecision(x.GetMeshed(), x.GetCapture()) }

func validateDecision(meshed bool, capture *Capture) error {
	if meshed != (capture != nil) {
		return limit.Errorf("capture", "present is %t although meshed is %t", capture != nil, meshed)
	}
	if capture == nil {
		return nil
	}
	return capture.validate("capture.")
}

// Validate checks every limit of a Capture. The error is a *limit.FieldError.
func (x *Capture) Validate() error { return x.validate("") }

func (x *Capture) validate(in string) error {
	var four, six int
	for i, r := range x.GetVipRanges() {
		field := fmt.Sprintf("%svip_ranges[%d]", in, i)
		p, err := checkPrefix(field, r)
		if err != nil {
			return err
		}
		if p.Addr().Is4() {
			four++
		} else {
			six++
		}
		if four > 1 || six > 1 {
			return limit.Errorf(field, "%s is a second range of its family, at most 1 is allowed", r)
		}
	}
	if four+six == 0 {
		return limit.Errorf(in+"vip_ranges", "0 entries, at least 1 is needed")
	}
	return limit.First(
		func() error { return x.validateTCPPorts(in + "tcp_ports") },
		func() error { return x.validateExcludes(in) },
	)
}

func (x *Capture) validateTCPPorts(field string) error {
	return limit.List(field, x.GetTcpPorts(), MaxTCPPorts, func(field string, p *AddressPort) error { return p.validate(field) })
}

func (x *Capture) validateExcludes(in string) error {
	if err := limit.List(in+"exclude_ports", x.GetExcludePorts(), MaxExcludes, limit.Port); err != nil {
		return err
	}
	return limit.List(in+"exclude_ranges", x.GetExcludeRanges(), MaxExcludes, func(field, r string) error {
		_, err := checkPrefix(field, r)
		return err
	})
}

// Validate checks an address with its port. The error is a *limit.FieldError.
func (x *AddressPort) Validate() error { return x.validate("address_port") }

func (x *AddressPort) validate(field string) error {
	if x == nil {
		return limit.Errorf(field, "is missing")
	}
	if err := checkAddress(field+".address", x.GetAddress()); err != nil {
		return err
	}
	return limit.Port(field+".port", x.GetPort())
}

// Validate checks every limit of a DelRequest. The error is a *limit.FieldError.
func (x *DelRequest) Validate() error {
	if err := x.GetAttachment().validate("attachment"); err != nil {
		return err
	}
	return checkNetwork("network", x.GetNetwork())
}

// Validate accepts every DelResponse: it has no fields.
func (x *DelResponse) Validate() error { return nil }

// Validate checks every limit of a CheckRequest. The error is a *limit.FieldError.
func (x *CheckRequest) Validate() error { return x.GetAttachment().validate("attachment") }

// Validate checks every limit of a GCRequest. The error is a *limit.FieldError.
func (x *GCRequest) Validate() error {
	if err := checkNetwork("network", x.GetNetwork()); err != nil {
		return err
	}
	return validateAttachments("valid", x.GetValid())
}

// Validate checks every limit of a GCResponse. The error is a *limit.FieldError.
func (x *GCResponse) Validate() error { return validateAttachments("removed", x.GetRemoved()) }

func validateAttachments(field string, list []*Attachment) error {
	return limit.List(field, list, MaxAttachments, func(field string, a *Attachment) error { return a.validate(field) })
}

// Validate accepts every StatusRequest: it has no fields.
func (x *StatusRequest) Validate() error { return nil }

// Validate checks every limit of a StatusResponse. The error is a *limit.FieldError.
func (x *StatusResponse) Validate() error {
	if err := limit.Bytes("reason", x.GetReason(), MaxReason); err != nil {
		return err
	}
	if x.GetReady() && x.GetLimited() {
		return limit.Errorf("limited", "is true although ready is true")
	}
	return nil
}

// Validate checks a note: it says exactly one thing, and that is valid. The
// error wraps a *limit.FieldError.
func (x *Note) Validate() error {
	if x.GetUnixNanos() <= 0 {
		return limit.Errorf("unix_nanos", "%d is no time after 1970", x.GetUnixNanos())
	}
	switch what := x.GetWhat().(type) {
	case *Note_Attached:
		return within("attached", what.Attached.Validate())
	case *Note_Unmeshed:
		return within("unmeshed", what.Unmeshed.Validate())
	case *Note_Deleted:
		return within("deleted", what.Deleted.Validate())
	}
	return limit.Errorf("what", "is missing: one of attached, unmeshed, deleted is needed")
}

func within(field string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	return nil
}

// Key returns the attachment that a note is about, nil for an empty note.
func (x *Note) Key() *Attachment {
	switch what := x.GetWhat().(type) {
	case *Note_Attached:
		return what.Attached.GetAttachment()
	case *Note_Unmeshed:
		return what.Unmeshed.GetAttachment()
	case *Note_Deleted:
		return what.Deleted.GetAttachment()
	}
	return nil
}
