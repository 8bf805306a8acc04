package netconf

import (
	"encoding/json"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
)

// Previous is the result of the plugins before this one.
type Previous struct {
	// Addresses of the pod, in the result's order.
	Addresses []netip.Addr
	// Nameservers of the result's dns that are addresses.
	Nameservers []netip.Addr
	// Document is what ADD prints: the result unchanged, down to fields that
	// this version does not know, at the configuration's version (C7, CNI-42).
	Document []byte
}

// Previous reads prevResult. One that is missing, damaged or without an address
// is CNI code 7: the plugin is chained, and a pod without an address cannot be
// meshed (C8, CNI-41).
func (c Config) Previous() (Previous, error) {
	if c.prevResult == nil {
		return Previous{}, types.NewError(types.ErrInvalidNetworkConfig,
			"no prevResult: portolan is chained, put it after the plugin that gives the pod its address", "")
	}
	damaged := func(err error) (Previous, error) {
		return Previous{}, types.NewError(types.ErrInvalidNetworkConfig,
			"prevResult cannot be read: check the plugins before portolan in the conflist", err.Error())
	}
	document, version, err := withVersion(c.prevResult, c.CNIVersion)
	if err != nil {
		return damaged(err)
	}
	result, err := create.Create(version, document)
	if err != nil {
		return damaged(err)
	}
	current, err := types100.NewResultFromResult(result)
	if err != nil {
		return damaged(err)
	}
	prev := Previous{Addresses: addresses(current), Nameservers: nameservers(current.DNS), Document: document}
	if len(prev.Addresses) == 0 {
		return Previous{}, types.NewError(types.ErrInvalidNetworkConfig,
			"prevResult has no address: check the address management of the plugins before portolan", "")
	}
	if version == c.CNIVersion {
		return prev, nil
	}
	if result, err = result.GetAsVersion(c.CNIVersion); err != nil {
		return damaged(err)
	}
	if prev.Document, err = json.Marshal(result); err != nil {
		return damaged(err)
	}
	return prev, nil
}

// withVersion returns a result and its version. One that says none has the
// configuration's, as the library reads it, and is given that.
func withVersion(result json.RawMessage, otherwise string) (json.RawMessage, string, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(result, &fields); err != nil {
		return nil, "", err
	}
	var version string
	if raw := fields["cniVersion"]; !isNull(raw) {
		if err := json.Unmarshal(raw, &version); err != nil {
			return nil, "", err
		}
	}
	if version != "" {
		return result, version, nil
	}
	text, err := json.Marshal(otherwise)
	if err != nil {
		return nil, "", err
	}
	fields["cniVersion"] = text
	result, err = json.Marshal(fields)
	return result, otherwise, err
}

// addresses returns the addresses on the pod's interfaces: those that name an
// interface outside any sandbox are the host's.
func addresses(result *types100.Result) []netip.Addr {
	var out []netip.Addr
	for _, ip := range result.IPs {
		if i := ip.Interface; i != nil && *i >= 0 && *i < len(result.Interfaces) && result.Interfaces[*i].Sandbox == "" {
			continue
		}
		if addr, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			out = append(out, addr.Unmap())
		}
	}
	return out
}

func nameservers(dns types.DNS) []netip.Addr {
	var out []netip.Addr
	for _, text := range dns.Nameservers {
		if addr, err := netip.ParseAddr(text); err == nil && addr.Zone() == "" {
			out = append(out, addr.Unmap())
		}
	}
	return out
}
