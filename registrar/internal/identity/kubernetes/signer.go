package kubernetes

import (
	"cmp"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/util/workqueue"

	"github.com/portolan-mesh/portolan/registrar/internal/identity"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// Times of the lease, as client-go recommends them.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	leaseRetry    = 2 * time.Second
	// bundleInterval is how often the ConfigMap is compared with the roots.
	bundleInterval = time.Minute
	// signers is how many requests are answered at one time.
	signers = 8
)

// SignerConfig is what a Signer needs.
type SignerConfig struct {
	Client kubernetes.Interface
	// Namespace is the mesh's own: of the Secret, the ConfigMap and the Lease.
	Namespace string
	// Name is this process's, in the Lease.
	Name string
	// Requesters is the user name of the registrars' ServiceAccount: nobody else gets
	// a certificate.
	Requesters  string
	TrustDomain string
	// Bypass are namespaces whose pods never join the mesh: their accounts get none.
	Bypass []string
	// Lifetime of the certificates.
	Lifetime time.Duration
	Clock    identity.Clock
	Log      *slog.Logger
	// Metrics takes the metrics; nil leaves them out.
	Metrics prometheus.Registerer
}

// Signer answers the cluster's requests while it holds the Lease.
type Signer struct {
	cfg     SignerConfig
	answers *prometheus.CounterVec
	leading prometheus.Gauge
}

// NewSigner returns a Signer that does not run yet.
func NewSigner(cfg SignerConfig) (*Signer, error) {
	if cfg.Client == nil || cfg.Namespace == "" || cfg.Name == "" || cfg.Requesters == "" || cfg.Clock == nil || cfg.Log == nil {
		return nil, errors.New("signer: Client, Namespace, Name, Requesters, Clock and Log must be set")
	}
	s := &Signer{
		cfg: cfg,
		answers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "portolan_signer_answers_total", Help: "Certificate requests by answer: signed, denied, failed.",
		}, []string{"answer"}),
		leading: prometheus.NewGauge(prometheus.GaugeOpts{Name: "portolan_signer_leading", Help: "1 while this process holds the Lease and signs."}),
	}
	if cfg.Metrics != nil {
		for _, c := range []prometheus.Collector{s.answers, s.leading} {
			if err := cfg.Metrics.Register(c); err != nil {
				return nil, fmt.Errorf("register the metrics of the signer: %w", err)
			}
		}
	}
	return s, nil
}

// Run stands for the Lease until ctx ends, and signs while it holds it. It returns
// with an error when the roots cannot be used: another process may then try.
func (s *Signer) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := s.stand(ctx); err != nil {
			return err
		}
	}
	return nil
}

// stand runs for the Lease once, until it is lost or ctx ends.
func (s *Signer) stand(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	elected := make(chan context.Context, 1)
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Name: lease, Namespace: s.cfg.Namespace},
			Client:     s.cfg.Client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: s.cfg.Name},
		},
		LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: leaseRetry, ReleaseOnCancel: true, Name: lease,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { elected <- ctx },
			OnStoppedLeading: func() {},
			OnNewLeader: func(name string) {
				s.cfg.Log.Info("who signs", "name", name, "this", name == s.cfg.Name)
			},
		},
	})
	if err != nil {
		return fmt.Errorf("stand for Lease %s/%s: %w", s.cfg.Namespace, lease, err)
	}
	lost := make(chan struct{})
	go func() {
		defer close(lost)
		elector.Run(ctx)
	}()
	select {
	case term := <-elected:
		err := s.lead(term) //nolint:contextcheck // the context of the term ends with the Lease
		if term.Err() != nil {
			err = nil // what fails once the Lease is lost is no fault
		}
		cancel() // who cannot sign lets others have the Lease
		<-lost
		return err
	case <-lost:
		return nil
	}
}

// lead signs until ctx ends, which is when the Lease is lost.
func (s *Signer) lead(ctx context.Context) error {
	store := &secret{client: s.cfg.Client.CoreV1().Secrets(s.cfg.Namespace), namespace: s.cfg.Namespace, now: s.cfg.Clock, ctx: ctx}
	ca, err := identity.NewCA(store, s.cfg.TrustDomain, s.cfg.Clock, s.cfg.Log)
	if err != nil {
		return err
	}
	if err := ca.SetLifetime(s.cfg.Lifetime); err != nil {
		return err
	}
	if err := s.spread(ctx, ca); err != nil {
		return err
	}
	s.leading.Set(1)
	defer s.leading.Set(0)
	s.cfg.Log.Info("signing", "trust_domain", s.cfg.TrustDomain, "roots", store.Where())
	return s.serve(ctx, ca)
}

// spread writes the roots for everybody.
func (s *Signer) spread(ctx context.Context, ca *identity.CA) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	b, err := ca.Bundle(ctx)
	if err != nil {
		return err
	}
	text := string(b.PEM())
	maps := s.cfg.Client.CoreV1().ConfigMaps(s.cfg.Namespace)
	if old, err := maps.Get(ctx, bundleConfigMap, metav1.GetOptions{}); err == nil && old.Data[bundleKey] == text {
		return nil
	}
	apply := applycorev1.ConfigMap(bundleConfigMap, s.cfg.Namespace).WithData(map[string]string{bundleKey: text})
	if _, err := maps.Apply(ctx, apply, metav1.ApplyOptions{FieldManager: fieldManager, Force: true}); err != nil {
		return fmt.Errorf("write the roots to ConfigMap %s/%s: %w", s.cfg.Namespace, bundleConfigMap, err)
	}
	return nil
}

// serve answers requests until ctx ends.
func (s *Signer) serve(ctx context.Context, ca *identity.CA) error {
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]())
	ours := func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.signerName", SignerName).String()
	}
	informer := informers.NewSharedInformerFactoryWithOptions(s.cfg.Client, 0, informers.WithTweakListOptions(ours)).
		Certificates().V1().CertificateSigningRequests().Informer()
	enqueue := func(obj any) {
		if csr, ok := obj.(*certificatesv1.CertificateSigningRequest); ok && !answered(csr) {
			queue.Add(csr.Name)
		}
	}
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: enqueue, UpdateFunc: func(_, obj any) { enqueue(obj) }}); err != nil {
		return fmt.Errorf("watch certificate requests: %w", err)
	}
	done := make(chan struct{})
	for range signers {
		go func() {
			defer func() { done <- struct{}{} }()
			s.work(ctx, queue, informer.GetStore(), ca)
		}()
	}
	go informer.RunWithContext(ctx)
	t := time.NewTicker(bundleInterval)
	defer t.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-t.C:
			if err := s.spread(ctx, ca); err != nil {
				s.cfg.Log.Error("roots are not spread; tried again", "error", err)
			}
		}
	}
	queue.ShutDown()
	for range signers {
		<-done
	}
	return nil
}

func (s *Signer) work(ctx context.Context, queue workqueue.TypedRateLimitingInterface[string], store cache.Store, ca *identity.CA) {
	for {
		name, end := queue.Get()
		if end {
			return
		}
		err := s.answer(ctx, name, store, ca)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			s.cfg.Log.Warn("certificate request is tried again", "name", name, "error", err)
			queue.AddRateLimited(name)
		default:
			queue.Forget(name)
		}
		queue.Done(name)
	}
}

// answer signs or denies one request; an error means that it is to be tried again.
func (s *Signer) answer(ctx context.Context, name string, store cache.Store, ca *identity.CA) error {
	obj, ok, err := store.GetByKey(name)
	if err != nil || !ok {
		return err
	}
	csr, ok := obj.(*certificatesv1.CertificateSigningRequest)
	if !ok || answered(csr) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	chain, err := s.sign(ctx, csr, ca)
	if errors.Is(err, identity.ErrRefused) {
		return s.deny(ctx, csr, err)
	}
	if err != nil {
		return err
	}
	return s.deliver(ctx, csr, chain)
}

// sign certifies what a request asks for, when it may ask for it.
func (s *Signer) sign(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, ca *identity.CA) ([][]byte, error) {
	if csr.Spec.Username != s.cfg.Requesters {
		return nil, fmt.Errorf("%w: %s may not ask, only %s may", identity.ErrRefused, csr.Spec.Username, s.cfg.Requesters)
	}
	nodes := csr.Spec.Extra[extraNode]
	if len(nodes) != 1 {
		return nil, fmt.Errorf("%w: the asking token is not bound to a pod on a node", identity.ErrRefused)
	}
	block, _ := pem.Decode(csr.Spec.Request)
	if block == nil || block.Type != pemRequest {
		return nil, fmt.Errorf("%w: no PEM block %s", identity.ErrRefused, pemRequest)
	}
	id, err := s.identityOf(block.Bytes)
	if err != nil {
		return nil, err
	}
	if slices.Contains(s.cfg.Bypass, id.Namespace) {
		return nil, fmt.Errorf("%w: pods of namespace %s never join the mesh (setting bypassNamespaces, flag --bypass-namespaces); one that is in it since before that was said is to be made anew",
			identity.ErrRefused, id.Namespace)
	}
	if err := s.runsOn(ctx, id, nodes[0]); err != nil {
		return nil, err
	}
	return ca.Sign(ctx, identity.SignRequest{Node: nodes[0], Identity: id, CSR: block.Bytes})
}

// identityOf reads whom a request is for: spiffe://<trust domain>/ns/<ns>/sa/<account>.
func (s *Signer) identityOf(der []byte) (model.Identity, error) {
	uri, err := identity.RequestedURI(der)
	if err != nil {
		return model.Identity{}, err
	}
	id, ok := parseIdentity(uri)
	if !ok || id.TrustDomain != s.cfg.TrustDomain {
		return model.Identity{}, fmt.Errorf("%w: %s is no workload of trust domain %s", identity.ErrRefused, uri, s.cfg.TrustDomain)
	}
	return id, nil
}

func parseIdentity(uri *url.URL) (model.Identity, bool) {
	part := strings.Split(uri.Path, "/")
	if len(part) != 5 || part[0] != "" || part[1] != "ns" || part[3] != "sa" {
		return model.Identity{}, false
	}
	id := model.Identity{TrustDomain: uri.Host, Namespace: part[2], Account: part[4]}
	return id, id.SPIFFE() == uri.String()
}

// runsOn refuses an identity of which no pod runs on the node, but for those that use the
// node's network and so cannot join. It asks the API server itself: a pod is bound to its
// node before anything of it starts.
func (s *Signer) runsOn(ctx context.Context, id model.Identity, node string) error {
	pods, err := s.cfg.Client.CoreV1().Pods(id.Namespace).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String(),
	})
	if err != nil {
		return fmt.Errorf("pods of node %s in namespace %s: %w", node, id.Namespace, err)
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		ended := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
		account := cmp.Or(p.Spec.ServiceAccountName, model.DefaultAccount)
		if account == id.Account && !ended && !p.Spec.HostNetwork {
			return nil
		}
	}
	return fmt.Errorf("%w: no pod of account %s/%s with a network of its own runs on node %s", identity.ErrRefused, id.Namespace, id.Account, node)
}

// deny says why a request is not signed.
func (s *Signer) deny(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, cause error) error {
	csr = csr.DeepCopy()
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateDenied, Status: corev1.ConditionTrue, Reason: "NotAllowed", Message: cause.Error(),
	})
	s.answers.WithLabelValues("denied").Inc()
	s.cfg.Log.Warn("certificate denied", "name", csr.Name, "asked_by", csr.Spec.Username, "node", csr.Spec.Extra[extraNode], "error", cause)
	_, err := s.cfg.Client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, csr.Name, csr, metav1.UpdateOptions{FieldManager: fieldManager})
	return ignoreGone(err)
}

// deliver approves a request and puts the certificate into it.
func (s *Signer) deliver(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, chain [][]byte) error {
	requests := s.cfg.Client.CertificatesV1().CertificateSigningRequests()
	csr = csr.DeepCopy()
	if _, approved := condition(csr, certificatesv1.CertificateApproved); !approved {
		csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "RunsOnNode", Message: "a pod of the account runs on the asking node",
		})
		var err error
		if csr, err = requests.UpdateApproval(ctx, csr.Name, csr, metav1.UpdateOptions{FieldManager: fieldManager}); err != nil {
			return ignoreGone(err)
		}
	}
	var text []byte
	for _, der := range chain {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: der})...)
	}
	csr.Status.Certificate = text
	_, err := requests.UpdateStatus(ctx, csr, metav1.UpdateOptions{FieldManager: fieldManager})
	if err == nil {
		s.answers.WithLabelValues("signed").Inc()
	}
	return ignoreGone(err)
}

// ignoreGone is for a request that its asker took back meanwhile.
func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
