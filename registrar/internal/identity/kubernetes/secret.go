package kubernetes

import (
	"context"
	"fmt"
	"io/fs"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
)

// callTimeout bounds one call to the API server.
const callTimeout = 10 * time.Second

// secret is the identity.RootStore in a Secret. Of two that write, the API server
// lets one through: each write names the version that it replaces.
type secret struct {
	client    typedcorev1.SecretInterface
	namespace string
	now       identity.Clock
	// ctx ends when the lease is lost: nothing is written afterwards.
	ctx context.Context //nolint:containedctx // RootStore has no context; this one is the lease's
	// version of what was read or written last; empty when there is no Secret.
	version string
	data    map[string][]byte
}

// Where implements identity.RootStore.
func (s *secret) Where() string { return fmt.Sprintf("Secret %s/%s", s.namespace, rootsSecret) }

// Load implements identity.RootStore.
func (s *secret) Load() ([]byte, error) {
	ctx, cancel := context.WithTimeout(s.ctx, callTimeout)
	defer cancel()
	got, err := s.client.Get(ctx, rootsSecret, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		s.version, s.data = "", nil
		return nil, fs.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Where(), err)
	}
	s.version, s.data = got.ResourceVersion, got.Data
	data, ok := got.Data[rootsKey]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return data, nil
}

// Save implements identity.RootStore.
func (s *secret) Save(data []byte) error {
	if s.data == nil {
		s.data = map[string][]byte{}
	}
	s.data[rootsKey] = data
	return s.write()
}

// SetAside implements identity.RootStore: the copy is another key of the Secret.
func (s *secret) SetAside() (string, error) {
	key := rootsKey + ".corrupt-" + s.now().UTC().Format("20060102T150405Z")
	s.data[key] = s.data[rootsKey]
	delete(s.data, rootsKey)
	return key, s.write()
}

func (s *secret) write() error {
	ctx, cancel := context.WithTimeout(s.ctx, callTimeout)
	defer cancel()
	object := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: rootsSecret, Namespace: s.namespace, ResourceVersion: s.version},
		Data:       s.data,
	}
	var err error
	if s.version == "" {
		object, err = s.client.Create(ctx, object, metav1.CreateOptions{FieldManager: fieldManager})
	} else {
		object, err = s.client.Update(ctx, object, metav1.UpdateOptions{FieldManager: fieldManager})
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", s.Where(), err)
	}
	s.version = object.ResourceVersion
	return nil
}
