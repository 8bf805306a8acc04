package kubernetes

import (
	"context"
	"log/slog"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
)

// OpenCA opens the CA in the Secret of namespace, as a signer does that has the Lease.
func OpenCA(ctx context.Context, client kubernetes.Interface, namespace, trustDomain string) (*identity.CA, error) {
	store := &secret{client: client.CoreV1().Secrets(namespace), namespace: namespace, now: time.Now, ctx: ctx}
	return identity.NewCA(store, trustDomain, time.Now, slog.New(slog.DiscardHandler))
}
