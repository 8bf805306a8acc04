package resource

import (
	"fmt"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// pack wraps m deterministically. It can fail only on text that is not UTF-8,
// which every builder refuses before it packs; hence a panic and no error.
func pack(m proto.Message) *anypb.Any {
	out := new(anypb.Any)
	if err := anypb.MarshalFrom(out, m, proto.MarshalOptions{Deterministic: true}); err != nil {
		panic(fmt.Sprintf("resource: pack %T: %v", m, err))
	}
	return out
}

// extension wraps a configured extension.
func extension(name string, m proto.Message) *corev3.TypedExtensionConfig {
	return &corev3.TypedExtensionConfig{Name: name, TypedConfig: pack(m)}
}

func duration(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

func u32(v uint32) *wrapperspb.UInt32Value { return wrapperspb.UInt32(v) }

func boolean(v bool) *wrapperspb.BoolValue { return wrapperspb.Bool(v) }

// socketAddress is a TCP address of the node's own network namespace.
func socketAddress(host string, port uint32) *corev3.SocketAddress {
	return &corev3.SocketAddress{Address: host, PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: port}}
}

// address wraps a socket address.
func address(a *corev3.SocketAddress) *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: a}}
}

// inNetns is a TCP address inside a pod's network namespace.
func inNetns(netns, host string, port uint32) *corev3.SocketAddress {
	a := socketAddress(host, port)
	a.NetworkNamespaceFilepath = netns
	return a
}
