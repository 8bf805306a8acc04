package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	pilotNamespace = "istio-system"
	pilotProgram   = "pilot-discovery"
	pilotImage     = "portolan/pilot:lab"
	// serviceProxy is who serves the Services that say so by the label: not kube-proxy, which
	// would be busy with rules for their addresses.
	serviceProxyLabel = "service.kubernetes.io/service-proxy-name"
	serviceProxy      = "bench"
)

// pilot is Istio's control plane, which the registrar is compared with. It has endpoints
// from EndpointSlices, and tells proxies of them in load assignments.
type pilot struct {
	rig *rig
	pid int
}

// startPilot runs it on the reader's node, as it is but without its debounce of
// endpoints.
func (r *rig) startPilot(ctx context.Context) (*pilot, error) {
	if err := r.lab.Run(ctx, r.lab.Script(), "load", pilotImage, filepath.Join(r.lab.Root, "bin/lab", pilotProgram)); err != nil {
		return nil, err
	}
	meta := metav1.ObjectMeta{Namespace: pilotNamespace, Name: "istiod"}
	_, err := r.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: pilotNamespace}}, metav1.CreateOptions{})
	if err == nil {
		_, err = r.client.CoreV1().ServiceAccounts(pilotNamespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: meta}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = r.client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "istiod"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: pilotNamespace, Name: "istiod"}},
		}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = r.client.CoreV1().Pods(pilotNamespace).Create(ctx, pilotPod(meta), metav1.CreateOptions{})
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", pilotProgram, err)
	}
	err = poll(ctx, 50*time.Millisecond, pilotProgram+" to be ready", func() (bool, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+nodeAddress(readerNode)+":8080/ready", http.NoBody)
		if err != nil {
			return false, err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return false, err
		}
		return resp.StatusCode == http.StatusOK, errors.Join(fmt.Errorf("it says %s", resp.Status), resp.Body.Close())
	})
	if err != nil {
		return nil, err
	}
	pid, err := r.lab.Process(readerNode, "/usr/local/bin/"+pilotProgram)
	return &pilot{rig: r, pid: pid}, err
}

func pilotPod(meta metav1.ObjectMeta) *corev1.Pod {
	field := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	return &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{
		NodeName: fmt.Sprint("node", readerNode), HostNetwork: true, ServiceAccountName: meta.Name,
		Containers: []corev1.Container{{
			Name: "discovery", Image: pilotImage, ImagePullPolicy: corev1.PullNever,
			Command: []string{"/usr/local/bin/" + pilotProgram, "discovery", "--log_output_level=default:warn"},
			// As its own chart asks for; no pod of the lab goes by memory.
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("500m")}},
			Env: []corev1.EnvVar{
				{Name: "PILOT_ENABLE_EDS_DEBOUNCE", Value: "false"},
				{Name: "POD_NAME", ValueFrom: field("metadata.name")},
				{Name: "POD_NAMESPACE", ValueFrom: field("metadata.namespace")},
			},
		}},
	}}
}

// sliced are as many endpoints as a fleet has, in an EndpointSlice for each service.
type sliced struct {
	client   kubernetes.Interface
	name     string
	services []*sliceOf
	each     int
}

type sliceOf struct {
	mu    sync.Mutex // held while it is written: a slice has many endpoints
	slice *discoveryv1.EndpointSlice
	// fresh counts the addresses that endpoints have had.
	fresh int
	index int
}

// newSlices makes Services of two ports and their endpoints.
func (p *pilot) newSlices(ctx context.Context, name string, endpoints, services int) (*sliced, error) {
	config := rest.CopyConfig(p.rig.config)
	config.ContentType = runtime.ContentTypeProtobuf // as controllers write them
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	s := &sliced{client: client, name: name, each: endpoints / services}
	for i := range services {
		meta := metav1.ObjectMeta{Namespace: namespace, Name: s.service(i), Labels: map[string]string{serviceProxyLabel: serviceProxy}}
		service := &corev1.Service{ObjectMeta: meta}
		slice := &discoveryv1.EndpointSlice{ObjectMeta: *meta.DeepCopy(), AddressType: discoveryv1.AddressTypeIPv4}
		slice.Labels[discoveryv1.LabelServiceName] = meta.Name
		for _, port := range ports() {
			name := fmt.Sprint("http-", port)
			service.Spec.Ports = append(service.Spec.Ports, corev1.ServicePort{Name: name, Port: port})
			slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &name, Port: &port})
		}
		of := &sliceOf{slice: slice, index: i}
		for range s.each {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{of.address()}})
		}
		s.services = append(s.services, of)
		if _, err := client.CoreV1().Services(namespace).Create(ctx, service, metav1.CreateOptions{}); err != nil {
			return nil, fmt.Errorf("make Service %s: %w", meta.Name, err)
		}
		if _, err := client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
			return nil, fmt.Errorf("make the endpoints of %s: %w", meta.Name, err)
		}
	}
	return s, nil
}

func ports() []int32 { return []int32{8080, 9090} }

// address returns one that no endpoint has had.
func (s *sliceOf) address() string {
	s.fresh++
	return fmt.Sprintf("100.%d.%d.%d", 64+s.index>>8, s.index&0xff, s.fresh)
}

func (s *sliced) service(i int) string { return fmt.Sprintf("%s-%d", s.name, i) }

func (s *sliced) size() (endpoints, services int) { return s.each * len(s.services), len(s.services) }

// next implements source: another address.
func (s *sliced) next(i int) (func(context.Context) error, change) {
	of := s.services[i%len(s.services)]
	of.mu.Lock()
	defer of.mu.Unlock()
	address := of.address()
	of.slice.Endpoints[i/len(s.services)].Addresses = []string{address}
	slice := of.slice.DeepCopy()
	return func(ctx context.Context) error {
		_, err := s.client.DiscoveryV1().EndpointSlices(namespace).Update(ctx, slice, metav1.UpdateOptions{})
		return err
	}, change{address: address, weight: 1}
}

// clusters are pilot's names of those of the first services, for both ports.
func (s *sliced) clusters(services int) []string {
	var names []string
	for i := range services {
		for _, port := range ports() {
			names = append(names, fmt.Sprintf("outbound|%d||%s.%s.svc.cluster.local", port, s.service(i), namespace))
		}
	}
	return names
}

func changesOfSlice(object json.RawMessage) []change {
	var slice discoveryv1.EndpointSlice
	if json.Unmarshal(object, &slice) != nil {
		return nil // what is waited for does not come
	}
	var all []change
	for _, endpoint := range slice.Endpoints {
		all = append(all, change{address: endpoint.Addresses[0], weight: 1})
	}
	return all
}

// start follows slices as a proxy does that asks for those of the first services.
func (p *pilot) start(ctx context.Context, s *sliced, subscribed int) (*course, error) {
	return p.rig.attend(ctx, s, places{
		target: nodeAddress(readerNode) + ":15010", node: fmt.Sprintf("sidecar~10.201.%d.250~bench.%s~%[2]s.svc.cluster.local", readerNode, namespace),
		clusters: s.clusters(subscribed), path: "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices", changes: changesOfSlice,
	})
}

// manyOfPilot is the load of as many endpoints and changes on pilot.
func manyOfPilot(ctx context.Context, r *rig) (l load, err error) {
	p, err := r.startPilot(ctx)
	if err != nil {
		return l, err
	}
	s, err := p.newSlices(ctx, "pilot", manyCount, manyServices)
	if err != nil {
		return l, err
	}
	c, err := p.start(ctx, s, manySubscribed)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, c.stop()) }()
	return c.load(ctx, p.pid)
}

// nodeAddress is where programs in a node's own network listen.
func nodeAddress(node int) string { return fmt.Sprint("10.200.0.", node) }
