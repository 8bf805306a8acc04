package attach

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/portolan-mesh/portolan/api/annotation"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// maxPending is how many edits of one pod are told of; what comes after them is left out.
const maxPending = 16

// whenAnew ends the text of every edit that a running pod does not follow.
const whenAnew = "the edit counts when the pod is made anew"

// staysIn says that a running pod does not follow what would keep it out of the mesh.
func staysIn(why string) Problem {
	return Problem{reasonPending, "the running pod stays in the mesh and keeps its ports: " + why + "; " + whenAnew}
}

// pending says which edits of a running pod's annotations do not count yet: where what an
// ADD would give the pod now differs from what it was given. A changed set of ports counts
// while the pod runs, and whether the pod joins is the caller's question.
func (m *Manager) pending(given model.Pod, cfg annotation.Config, w model.Workload) []Problem {
	// Not the ranges: the pod's address is none of its annotations, and not for long.
	now, err := podOf(again(given), cfg, Facts{TrustDomain: m.cfg.TrustDomain, Now: given.Since, Workload: &w})
	if err != nil {
		return []Problem{{reasonPending, fmt.Sprintf("the running pod keeps the service %s, and made anew it would not start: %v", annotation.Quote(given.Service.Name), err)}}
	}
	var wrong []Problem
	differs := func(different bool, key, kept string) {
		if different && len(wrong) < maxPending {
			wrong = append(wrong, Problem{reasonPending, edited(key, w.Annotations, kept)})
		}
	}
	differs(given.Service != now.Service, annotation.KeyService, keeps(given.Service.Name))
	differs(given.Weight != now.Weight, annotation.KeyWeight, keeps(fmt.Sprint(given.Weight)))
	differs(!slices.Equal(given.Upstreams, now.Upstreams), annotation.KeyUpstreams, keepsList(given.Upstreams))
	differs(!slices.Equal(given.ExcludePorts, now.ExcludePorts), annotation.KeyExcludePorts, keepsList(given.ExcludePorts))
	differs(!slices.Equal(given.ExcludeRanges, now.ExcludeRanges), annotation.KeyExcludeRanges, keepsList(given.ExcludeRanges))
	keys := map[string]string{}
	maps.Copy(keys, now.Metadata)
	maps.Copy(keys, given.Metadata)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		had, was := given.Metadata[key]
		has, is := now.Metadata[key]
		kept := keepsNone
		if was {
			kept = keeps(had)
		}
		differs(was != is || had != has, annotation.KeyMetadataPrefix+key, kept)
	}
	return wrong
}

// again is the request of a pod's ADD, as far as annotations and account say the rest.
func again(pod model.Pod) *cniv1.AddRequest {
	req := &cniv1.AddRequest{
		Attachment: &cniv1.Attachment{ContainerId: pod.Key.ContainerID, Ifname: pod.Key.IfName},
		CniArgs:    map[string]string{argNamespace: pod.Namespace, argName: pod.Name, argUID: pod.RuntimeUID},
	}
	for _, a := range pod.Addresses {
		req.Addresses = append(req.Addresses, a.String())
	}
	return req
}

// edited says that an annotation, as it is now or is not any more, does not count yet.
func edited(key string, annotations map[string]string, kept string) string {
	if value, ok := annotations[key]; ok {
		return (&annotation.Error{Key: key, Value: value, Problem: kept, Remedy: whenAnew}).Error()
	}
	return key + " is not there any more: " + kept + "; " + whenAnew
}

// keepsNone is keeps of an annotation that the pod did not have.
const keepsNone = "the running pod goes on without it"

// keeps says what counts until the pod is made anew.
func keeps(value string) string { return "the running pod keeps " + annotation.Quote(value) }

func keepsList[T any](values []T) string {
	if len(values) == 0 {
		return keepsNone
	}
	out := make([]string, len(values))
	for i, v := range values {
		out[i] = fmt.Sprint(v)
	}
	return keeps(strings.Join(out, ","))
}

// superseded reports whether the pod has a later attachment, as when its sandbox was made
// anew and the former one was not taken away yet: that one has what the pod was given last.
// The caller holds mu.
func (m *Manager) superseded(a *attachment) bool {
	for _, o := range m.pods {
		if o != a && !o.leaving && o.pod.UID == a.pod.UID && o.pod.Since.After(a.pod.Since) {
			return true
		}
	}
	return false
}
