package kubernetes

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	typedv1 "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
)

// RequesterConfig is what a Requester needs.
type RequesterConfig struct {
	Client kubernetes.Interface
	// Namespace is the mesh's own, where the roots are.
	Namespace string
	// TrustDomain is the mesh's.
	TrustDomain string
	// Saved keeps the last roots over a restart, so that a node whose API server is
	// away goes on with the certificates that it has.
	Saved identity.BundleStore
	Log   *slog.Logger
}

// Requester is the identity.Signer of a node: it asks the cluster's Signer. It is
// safe for concurrent use.
type Requester struct{ cfg RequesterConfig }

// NewRequester returns a Requester; it asks nobody yet.
func NewRequester(cfg RequesterConfig) (*Requester, error) {
	if cfg.Client == nil || cfg.Namespace == "" || cfg.TrustDomain == "" || cfg.Saved == nil || cfg.Log == nil {
		return nil, errors.New("certificate requester: Client, Namespace, TrustDomain, Saved and Log must be set")
	}
	return &Requester{cfg: cfg}, nil
}

// cleanUp bounds the removal of an answered request; what stays is removed by the
// cluster after an hour.
const cleanUp = 5 * time.Second

// rootsTimeout bounds the question for the roots: a registrar that starts while the API
// server does not answer goes on with the saved ones.
const rootsTimeout = 2 * time.Second

// Sign implements identity.Signer: it makes a CertificateSigningRequest, waits for
// its certificate and removes it. A denial is identity.ErrRefused.
func (r *Requester) Sign(ctx context.Context, req identity.SignRequest) ([][]byte, error) {
	requests := r.cfg.Client.CertificatesV1().CertificateSigningRequests()
	made, err := requests.Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "portolan-" + req.Node + "-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: pemRequest, Bytes: req.CSR}),
			SignerName: SignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth, certificatesv1.UsageServerAuth},
		},
	}, metav1.CreateOptions{FieldManager: fieldManager})
	if err != nil {
		return nil, fmt.Errorf("ask for the certificate of %s: %w", req.Identity.SPIFFE(), err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUp)
		defer cancel()
		if err := requests.Delete(ctx, made.Name, metav1.DeleteOptions{}); err != nil {
			r.cfg.Log.Debug("answered certificate request stays", "name", made.Name, "error", err)
		}
	}()
	answered, err := await(ctx, requests, made.Name)
	if err != nil {
		return nil, fmt.Errorf("certificate of %s: request %s is not answered, does `registrar signer` run? %w", req.Identity.SPIFFE(), made.Name, err)
	}
	return chainOf(answered)
}

// await waits for an answer to a request.
func await(ctx context.Context, requests typedv1.CertificateSigningRequestInterface, name string) (*certificatesv1.CertificateSigningRequest, error) {
	this := fields.OneTermEqualSelector("metadata.name", name).String()
	list := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = this
			return requests.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = this
			return requests.Watch(ctx, o)
		},
	}
	event, err := toolswatch.UntilWithSync(ctx, list, &certificatesv1.CertificateSigningRequest{}, nil, func(e watch.Event) (bool, error) {
		csr, ok := e.Object.(*certificatesv1.CertificateSigningRequest)
		if e.Type == watch.Deleted {
			return false, errors.New("the request was deleted")
		}
		return ok && answered(csr), nil
	})
	if err != nil {
		return nil, err
	}
	csr, ok := event.Object.(*certificatesv1.CertificateSigningRequest)
	if !ok {
		return nil, fmt.Errorf("the API server answered with a %T", event.Object)
	}
	return csr, nil
}

func condition(csr *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType) (certificatesv1.CertificateSigningRequestCondition, bool) {
	for _, c := range csr.Status.Conditions {
		if c.Type == kind {
			return c, true
		}
	}
	return certificatesv1.CertificateSigningRequestCondition{}, false
}

func answered(csr *certificatesv1.CertificateSigningRequest) bool {
	_, denied := condition(csr, certificatesv1.CertificateDenied)
	_, failed := condition(csr, certificatesv1.CertificateFailed)
	return denied || failed || len(csr.Status.Certificate) > 0
}

// chainOf reads the answer to a request.
func chainOf(csr *certificatesv1.CertificateSigningRequest) ([][]byte, error) {
	if c, ok := condition(csr, certificatesv1.CertificateDenied); ok {
		return nil, fmt.Errorf("%w: %s: %s", identity.ErrRefused, c.Reason, c.Message)
	}
	if c, ok := condition(csr, certificatesv1.CertificateFailed); ok {
		return nil, fmt.Errorf("the signer failed: %s: %s", c.Reason, c.Message)
	}
	var chain [][]byte
	for rest := csr.Status.Certificate; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type == pemCertificate {
			chain = append(chain, block.Bytes)
		}
	}
	if len(chain) == 0 {
		return nil, errors.New("the signer's answer has no certificate")
	}
	return chain, nil
}

// Bundle implements identity.Signer: the roots in the ConfigMap. While there are none, as
// with the API server away or the ConfigMap edited by hand, it is what was there last.
func (r *Requester) Bundle(ctx context.Context) (identity.Bundle, error) {
	asking, cancel := context.WithTimeout(ctx, rootsTimeout)
	defer cancel()
	m, err := r.cfg.Client.CoreV1().ConfigMaps(r.cfg.Namespace).Get(asking, bundleConfigMap, metav1.GetOptions{})
	if err == nil {
		var b identity.Bundle
		if b, err = r.take(m); err == nil || errors.Is(err, identity.ErrTrustDomain) {
			return b, err
		}
	}
	err = fmt.Errorf("ConfigMap %s/%s, which `registrar signer` writes: %w", r.cfg.Namespace, bundleConfigMap, err)
	saved, loadErr := r.cfg.Saved.Load(r.cfg.TrustDomain)
	if loadErr != nil {
		return identity.Bundle{}, errors.Join(err, loadErr)
	}
	r.cfg.Log.Warn("there are no roots to fetch; those that were seen last are used", "error", err)
	return saved, nil
}

func (r *Requester) take(m *corev1.ConfigMap) (identity.Bundle, error) {
	b, err := identity.ParseBundle(r.cfg.TrustDomain, []byte(m.Data[bundleKey]))
	if errors.Is(err, identity.ErrTrustDomain) {
		// The signer does not replace such a root on its own: there is no way back.
		return identity.Bundle{}, fmt.Errorf("ConfigMap %s/%s: %w; set the trust domain back, or delete Secret %s/%s: `registrar signer` then makes a root of the new one and every certificate is reissued",
			m.Namespace, m.Name, err, r.cfg.Namespace, rootsSecret)
	}
	if err != nil {
		return identity.Bundle{}, err
	}
	if err := r.cfg.Saved.Save(b); err != nil {
		r.cfg.Log.Error("roots are not saved: with the API server away a restart would have none", "error", err)
	}
	return b, nil
}

var _ identity.Signer = (*Requester)(nil)
