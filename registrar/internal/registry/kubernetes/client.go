package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
)

const (
	// fieldManager owns the fields of our objects in server-side apply.
	fieldManager = "portolan-registrar"
	// callTimeout bounds one write (MESH-34).
	callTimeout = 10 * time.Second
)

// client speaks to the API server about ServiceEndpoints.
type client struct {
	rest  *rest.RESTClient
	http  *http.Client
	codec runtime.ParameterCodec
	own   ownNode
}

// ownNode is the node whose pod the API server takes us for.
type ownNode struct {
	mu    sync.Mutex // held while it is asked
	asked bool
	uid   types.UID
}

// newClient makes a client of its own from config, which it does not change.
func newClient(config *rest.Config) (*client, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"}) // a failure's Status
	config = rest.CopyConfig(config)
	gv := v1alpha1.GroupVersion()
	config.GroupVersion = &gv
	config.APIPath = "/apis"
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	// A change is one small object: to unpack it takes both sides longer than to send it.
	config.DisableCompression = true
	// The writers are few and the server has its own priorities: no limit here.
	config.QPS = -1
	config.UserAgent = rest.DefaultKubernetesUserAgent()
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("client of the Kubernetes API at %s: %w", config.Host, err)
	}
	restClient, err := rest.RESTClientForConfigAndClient(config, httpClient)
	if err != nil {
		return nil, fmt.Errorf("client of the Kubernetes API at %s: %w", config.Host, err)
	}
	return &client{rest: restClient, http: httpClient, codec: runtime.NewParameterCodec(scheme)}, nil
}

func (c *client) close() { c.http.CloseIdleConnections() }

func (c *client) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	list := &v1alpha1.ServiceEndpointList{}
	err := c.rest.Get().Resource(v1alpha1.Resource).VersionedParams(&o, c.codec).Do(ctx).Into(list)
	return list, err
}

func (c *client) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	stream, err := c.rest.Get().Resource(v1alpha1.Resource).VersionedParams(&o, c.codec).Stream(ctx)
	if err != nil {
		return nil, err
	}
	return watch.NewStreamWatcher(newDecoder(stream), apierrors.NewClientErrorReporter(http.StatusInternalServerError, http.MethodGet, "ClientWatchDecoding")), nil
}

// apply makes the object what it is here, whatever it was; it returns what the
// server has then.
func (c *client) apply(ctx context.Context, object *v1alpha1.ServiceEndpoint) (*v1alpha1.ServiceEndpoint, error) {
	body, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	force := true
	result := &v1alpha1.ServiceEndpoint{}
	err = c.rest.Patch(types.ApplyPatchType).Namespace(object.Namespace).Resource(v1alpha1.Resource).Name(object.Name).
		VersionedParams(&metav1.PatchOptions{FieldManager: fieldManager, Force: &force}, c.codec).Body(body).Do(ctx).Into(result)
	return result, err
}

// nodeUID returns the UID of the node that the API server itself put into our token, by
// which the policy goes; empty if it put none.
func (c *client) nodeUID(ctx context.Context) (types.UID, error) {
	c.own.mu.Lock()
	defer c.own.mu.Unlock()
	if c.own.asked {
		return c.own.uid, nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := c.rest.Post().AbsPath("/apis/authentication.k8s.io/v1/selfsubjectreviews").SetHeader("Content-Type", "application/json").
		Body([]byte(`{"kind":"SelfSubjectReview","apiVersion":"authentication.k8s.io/v1"}`)).Do(ctx).Raw()
	if err != nil {
		return "", err
	}
	var who authenticationv1.SelfSubjectReview
	if err := json.Unmarshal(answer, &who); err != nil {
		return "", fmt.Errorf("who we are to the Kubernetes API: %w", err)
	}
	if uid := who.Status.UserInfo.Extra["authentication.kubernetes.io/node-uid"]; len(uid) == 1 {
		c.own.uid = types.UID(uid[0])
	}
	c.own.asked = true
	return c.own.uid, nil
}

// forgetNode lets nodeUID ask again.
func (c *client) forgetNode() {
	c.own.mu.Lock()
	defer c.own.mu.Unlock()
	c.own.asked, c.own.uid = false, ""
}

// delete takes this very object away: one of the same name that was made since stays.
func (c *client) delete(ctx context.Context, key types.NamespacedName, uid types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return c.rest.Delete().Namespace(key.Namespace).Resource(v1alpha1.Resource).Name(key.Name).
		Body(&metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(uid))}).Do(ctx).Error()
}
