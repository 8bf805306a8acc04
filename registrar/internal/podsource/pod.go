package podsource

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/portolan-mesh/portolan/api/annotation"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// mirrorAnnotation is on the API object of a static pod; its value is the UID that
// the kubelet and the runtime know the pod by.
const mirrorAnnotation = corev1.MirrorPodAnnotationKey

// pod is what is kept of one API object.
type pod struct {
	workload model.Workload
	// word of the pod's own label; the namespace's counts when it is Unset.
	word    annotation.Managed
	problem string
	created time.Time
	// mirror: the object stands for a static pod, which comes and goes without it.
	mirror bool
	// reported: the kubelet has written into the object how the pod is.
	reported bool
	// gone: its object was deleted, and no other has taken its place. The pod counts as
	// ended from then on, a static one only from until.
	gone  bool
	until time.Time
}

// podKey finds a pod by its name and by the UID that the runtime is told. The UID alone
// would not do: whoever may make pods may make a mirror that names another pod's.
type podKey struct{ namespace, name, uid string }

func (p *pod) key() podKey { return podKey{p.workload.Namespace, p.workload.Name, p.workload.UID} }

// ended reports whether the pod is none of this node's any more.
func (p *pod) ended(now time.Time) bool { return p.gone && !now.Before(p.until) }

// succeed takes over from the object before it what the kubelet has not said yet of a
// mirror that was made anew: to the containers nothing has happened.
func (p *pod) succeed(old pod) {
	if p.mirror && !p.reported && old.workload.Ending == model.Living {
		p.workload.Running, p.workload.Ready = old.workload.Running, old.workload.Ready
	}
}

// trim is the informers' transform: nothing but what podOf reads stays in memory.
func trim(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Pod:
		return trimPod(o), nil
	case *metav1.PartialObjectMetadata:
		o.ObjectMeta = metav1.ObjectMeta{Name: o.Name, ResourceVersion: o.ResourceVersion, Labels: managedOnly(o.Labels)}
		return o, nil
	}
	return obj, nil
}

func trimPod(p *corev1.Pod) *corev1.Pod {
	out := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
			CreationTimestamp: p.CreationTimestamp, DeletionTimestamp: p.DeletionTimestamp, Labels: managedOnly(p.Labels),
		},
		Spec:   corev1.PodSpec{ServiceAccountName: p.Spec.ServiceAccountName, HostNetwork: p.Spec.HostNetwork},
		Status: corev1.PodStatus{Phase: p.Status.Phase},
	}
	for key, value := range p.Annotations {
		if annotation.Own(key) || key == mirrorAnnotation {
			metav1.SetMetaDataAnnotation(&out.ObjectMeta, key, value)
		}
	}
	out.Status.Conditions = slices.DeleteFunc(slices.Clone(p.Status.Conditions), func(c corev1.PodCondition) bool { return c.Type != corev1.PodReady })
	return out
}

func managedOnly(labels map[string]string) map[string]string {
	if value, ok := labels[annotation.KeyManaged]; ok {
		return map[string]string{annotation.KeyManaged: value}
	}
	return nil
}

// podOf reads an API object.
func podOf(p *corev1.Pod) pod {
	out := pod{created: p.CreationTimestamp.Time}
	out.word, out.problem = labelWord("pod", p.Labels)
	condition, reported := ready(p)
	out.reported = reported
	w := &out.workload
	*w = model.Workload{
		Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), ObjectUID: string(p.UID),
		Account: cmp.Or(p.Spec.ServiceAccountName, model.DefaultAccount), HostNetwork: p.Spec.HostNetwork,
		Running: p.Status.Phase == corev1.PodRunning, Ready: condition, Ending: ending(p),
	}
	for key, value := range p.Annotations {
		switch {
		case key == mirrorAnnotation:
			w.UID, out.mirror = value, true
		case annotation.Own(key):
			if w.Annotations == nil {
				w.Annotations = map[string]string{}
			}
			w.Annotations[key] = value
		}
	}
	return out
}

// labelWord reads the label aether.io/managed of an object of that kind.
func labelWord(kind string, labels map[string]string) (word annotation.Managed, problem string) {
	value, ok := labels[annotation.KeyManaged]
	if !ok {
		return annotation.Unset, ""
	}
	word, err := annotation.ParseManaged(value)
	if bad, ok := errors.AsType[*annotation.Error](err); ok {
		return annotation.Unset, fmt.Sprintf("label of the %s: %s", kind, bad)
	}
	return word, ""
}

// ready is the pod's Ready condition; ok is false while the kubelet has not written it.
func ready(p *corev1.Pod) (value, ok bool) {
	i := slices.IndexFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady })
	return i >= 0 && p.Status.Conditions[i].Status == corev1.ConditionTrue, i >= 0
}

func ending(p *corev1.Pod) model.Ending {
	_, mirror := p.Annotations[mirrorAnnotation]
	switch {
	case p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed:
		return model.Finished
	case p.DeletionTimestamp != nil && !mirror: // who deletes a mirror ends no static pod
		return model.Terminating
	}
	return model.Living
}
