package cache

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// typePrefix is what precedes a message name in an Any's type URL.
const typePrefix = "type.googleapis.com/"

// versionBytes is how much of the hash makes a version: 16 hex digits. It has to
// tell one name's successive contents apart, nothing more.
const versionBytes = 8

// Resource is one named configuration object, serialised once and shared by all
// streams. It is immutable: nobody may change what Body points to once the
// resource was made (XDS-46).
type Resource struct {
	// Name is the xDS resource name, byte for byte what is asked for (XDS-R27).
	Name string
	// Version is a hash of Body's bytes: the same content has the same version in
	// every process (XDS-R22).
	Version string
	// Body is the serialised message.
	Body *anypb.Any
}

// NewResource serialises m deterministically and derives the version from the
// bytes. Repeated fields and nested Any values must already be in a fixed order;
// that is the builder's part (XDS-R18).
func NewResource(name string, m proto.Message) (Resource, error) {
	if name == "" || name == wildcardName {
		return Resource{}, fmt.Errorf("resource name %q: %w", name, errName)
	}
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return Resource{}, fmt.Errorf("serialise resource %q: %w", name, err)
	}
	return Resource{
		Name:    name,
		Version: hash(body),
		Body: &anypb.Any{
			TypeUrl: typePrefix + string(m.ProtoReflect().Descriptor().FullName()),
			Value:   body,
		},
	}, nil
}

var errName = errors.New(`must be neither empty nor "*"`)

func hash(body []byte) string {
	sum := sha256.Sum256(body)
	var text [2 * versionBytes]byte
	hex.Encode(text[:], sum[:versionBytes])
	return string(text[:])
}

// emptyAssignment is the answer for a load assignment that does not exist: the
// cluster becomes usable and has no host, instead of warming until a timeout
// (XDS-D1, XDS-D5). It is not ok for a name that cannot be serialised.
func emptyAssignment(name string) (r Resource, ok bool) {
	r, err := NewResource(name, &endpointv3.ClusterLoadAssignment{ClusterName: name})
	return r, err == nil
}
