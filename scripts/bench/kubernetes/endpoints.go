package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/scripts/lab"
)

const (
	// absentNode is the node of the endpoints that are written here.
	absentNode = "elsewhere"
	// heldGate keeps their pod from every node.
	heldGate = "aether.io/bench"
)

// endpointsPath is where the API server has the namespace's ServiceEndpoints.
const endpointsPath = "/apis/" + v1alpha1.Group + "/" + v1alpha1.Version + "/namespaces/" + namespace + "/" + v1alpha1.Resource

// endpoints are the namespace's ServiceEndpoints.
func (r *rig) endpoints(ctx context.Context) ([]v1alpha1.ServiceEndpoint, error) {
	raw, err := r.client.CoreV1().RESTClient().Get().AbsPath(endpointsPath).SetHeader("Accept", "application/json").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("list ServiceEndpoints: %w", err)
	}
	var list v1alpha1.ServiceEndpointList
	err = json.Unmarshal(raw, &list)
	return list.Items, err
}

// registrar writes endpoints as a registrar of a node does, with its rights and
// under the policy of its node.
type registrar struct{ rest rest.Interface }

func (r *rig) absentRegistrar() (registrar, error) {
	config := rest.CopyConfig(r.config)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + lab.MeshNamespace + ":portolan-registrar",
		Extra:    map[string][]string{"authentication.kubernetes.io/node-name": {absentNode}},
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return registrar{}, err
	}
	return registrar{client.CoreV1().RESTClient()}, nil
}

// owner makes the pod that a fleet belongs to, as the policy demands and so that the
// garbage collector leaves it. It waits for a node for ever.
func (r *rig) owner(ctx context.Context, name string) (*corev1.Pod, error) {
	pod, err := r.client.CoreV1().Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{
			SchedulingGates: []corev1.PodSchedulingGate{{Name: heldGate}},
			Containers:      []corev1.Container{{Name: "none", Image: "none"}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("make the pod that endpoints belong to: %w", err)
	}
	return pod, nil
}

// apply writes an endpoint.
func (r registrar) apply(ctx context.Context, ep *v1alpha1.ServiceEndpoint) error {
	body, err := json.Marshal(ep)
	if err != nil {
		return err
	}
	_, err = r.rest.Patch(types.ApplyPatchType).AbsPath(endpointsPath, ep.Name).SetHeader("Accept", "application/json").
		Param("fieldManager", "portolan-registrar").Param("force", "true").Body(body).DoRaw(ctx)
	return err
}

// fleet are synthetic endpoints of so many services in turn, all of one pod.
type fleet struct {
	registrar registrar
	name      string
	endpoints []*v1alpha1.ServiceEndpoint
	services  int
}

// newFleet makes them as the registrar of absentNode would write them, and their pod.
func (r *rig) newFleet(ctx context.Context, name string, endpoints, services int, network byte) (*fleet, error) {
	registrar, err := r.absentRegistrar()
	if err != nil {
		return nil, err
	}
	pod, err := r.owner(ctx, name)
	if err != nil {
		return nil, err
	}
	owners := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}}
	f := &fleet{registrar: registrar, name: name, services: services}
	now := time.Now().UnixNano() // no container ID comes twice, and readers count on it
	for i := range endpoints {
		service := f.service(i)
		ip := v1alpha1.Address(fmt.Sprintf("10.%d.%d.%d", network, i>>8, i&0xff))
		id := fmt.Sprintf("%060x%04x", now, i)
		f.endpoints = append(f.endpoints, &v1alpha1.ServiceEndpoint{
			TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: v1alpha1.Kind},
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s-7d9c5b8f6d-%05d-%012x", service, i, i), OwnerReferences: owners},
			Spec: v1alpha1.ServiceEndpointSpec{
				UID: id + "/eth0", ContainerID: id, SinceUnixNanos: now,
				Service: service, ClusterName: f.cluster(i), ServiceAccount: service, TrustDomain: "aether.internal",
				IP: ip, Addresses: []v1alpha1.Address{ip}, Port: 8080, Ports: "8080,9090=h2", Health: v1alpha1.Healthy, Weight: 1,
				NodeName: absentNode, PodName: pod.Name, PodUID: string(pod.UID),
			},
		})
	}
	return f, nil
}

// service of the i-th endpoint, and its cluster for the default port.
func (f *fleet) service(i int) string { return fmt.Sprintf("%s-%d", f.name, i%f.services) }
func (f *fleet) cluster(i int) string { return f.service(i) + "." + namespace + ".aether.internal" }

// clusters are those of the first services, for both ports.
func (f *fleet) clusters(services int) []string {
	var names []string
	for i := range services {
		names = append(names, f.cluster(i), f.cluster(i)+":9090")
	}
	return names
}

func (f *fleet) size() (endpoints, services int) { return len(f.endpoints), f.services }

// next implements source: another weight.
func (f *fleet) next(i int) (func(context.Context) error, change) {
	ep := f.endpoints[i]
	ep.Spec.Generation++
	ep.Spec.Weight = 1 + int32(ep.Spec.Generation%1000)
	return func(ctx context.Context) error { return f.registrar.apply(ctx, ep) }, changeOf(ep)
}

// changeOf is how the state of an endpoint is recognised.
func changeOf(ep *v1alpha1.ServiceEndpoint) change {
	return change{address: string(ep.Spec.IP), weight: uint32(ep.Spec.Weight)}
}
