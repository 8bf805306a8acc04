package main

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/scripts/bench/internal/measure"
)

// writes are numbers of requests that changed something in the API server, by
// resource and verb.
type writes map[string]float64

// requestLine is a number of requests in the API server's metrics.
var requestLine = regexp.MustCompile(`^apiserver_request_total\{.*code="(\d+)".*resource="([^"]+)",.*subresource="([^"]*)",verb="([A-Z]+)".*\} ([0-9.e+]+)$`)

// counts reports that requests change something, and not by the clock.
func counts(code, resource, verb string) bool {
	return strings.HasPrefix(code, "2") && slices.Contains([]string{"POST", "PUT", "PATCH", "APPLY", "DELETE"}, verb) &&
		!slices.Contains([]string{"leases", "nodes", "subjectaccessreviews", "tokenreviews"}, resource)
}

// settledWrites are those so far, when no ServiceEndpoint is left of the pods that
// are gone.
func (r *rig) settledWrites(ctx context.Context) (writes, error) {
	if r.installed {
		err := poll(ctx, 100*time.Millisecond, "the last ServiceEndpoint to be deleted", func() (bool, error) {
			endpoints, err := r.endpoints(ctx)
			return err == nil && !slices.ContainsFunc(endpoints, func(ep v1alpha1.ServiceEndpoint) bool { return ep.Spec.Service == "server" }), err
		})
		if err != nil {
			return nil, err
		}
	}
	text, err := r.client.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("metrics of the API server: %w", err)
	}
	all := make(writes)
	for line := range strings.Lines(string(text)) {
		m := requestLine.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if m == nil || !counts(m[1], m[2], m[4]) {
			continue
		}
		n, err := strconv.ParseFloat(m[5], 64)
		if err != nil {
			return nil, fmt.Errorf("metrics of the API server: %w", err)
		}
		name := m[2]
		if m[3] != "" {
			name += "/" + m[3]
		}
		all[strings.ToLower(m[4])+" "+name] += n
	}
	return all, nil
}

// since is how many came after before, for each of so many pods.
func (w writes) since(before writes, pods int) writes {
	each := w.minus(before)
	for name := range each {
		each[name] /= float64(pods)
	}
	return each
}

func (w writes) total() float64 {
	var n float64
	for _, more := range w {
		n += more
	}
	return n
}

func (w writes) String() string {
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(w)) {
		texts = append(texts, fmt.Sprintf("%s %.3g", name, w[name]))
	}
	return strings.Join(texts, ", ")
}

// minus is what w has more than others.
func (w writes) minus(others writes) writes {
	more := make(writes)
	for name, n := range w {
		if n -= others[name]; n > 0 {
			more[name] = n
		}
	}
	return more
}

// written compares the writes for one pod.
func written(unmeshed, meshed, first writes) measure.Figure {
	adds, certificate := meshed.minus(unmeshed), first.minus(meshed)
	return measure.Figure{
		OK: adds.total() <= 4, What: "API writes in the life of a pod, that the mesh adds",
		Measured: fmt.Sprintf("%.3g (%s); with the certificate of an account that has no other pod on the node %.3g more", adds.total(), adds, certificate.total()),
		Compared: fmt.Sprintf("pods not in the mesh (%.3g)", unmeshed.total()), Aim: "<= 4",
	}
}
