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
)

// writes are numbers of requests that change something in the API server, by resource.
type writes map[string]float64

// writeLine is such a request in the API server's metrics.
var writeLine = regexp.MustCompile(`^apiserver_request_total\{.*resource="([^"]+)".*verb="(?:POST|PUT|PATCH|APPLY|DELETE)".*\} ([0-9.e+]+)$`)

// clockwork are the resources that are written by the clock or that store nothing.
func clockwork(resource string) bool {
	return slices.Contains([]string{"leases", "nodes", "subjectaccessreviews", "tokenreviews"}, resource)
}

// writes are those so far.
func (r *rig) writes(ctx context.Context) (writes, error) {
	text, err := r.client.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return nil, fmt.Errorf("metrics of the API server: %w", err)
	}
	all := make(writes)
	for line := range strings.Lines(string(text)) {
		m := writeLine.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if m == nil || clockwork(m[1]) {
			continue
		}
		n, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return nil, fmt.Errorf("metrics of the API server: %w", err)
		}
		all[m[1]] += n
	}
	return all, nil
}

// since is how many came after before, for each of so many pods.
func (w writes) since(before writes, pods int) writes {
	each := make(writes)
	for resource, n := range w {
		if n -= before[resource]; n > 0 {
			each[resource] = n / float64(pods)
		}
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
	for _, resource := range slices.Sorted(maps.Keys(w)) {
		texts = append(texts, fmt.Sprintf("%s %.3g", resource, w[resource]))
	}
	return strings.Join(texts, ", ")
}

// awaitNoEndpoints waits until the namespace has no ServiceEndpoint.
func (r *rig) awaitNoEndpoints(ctx context.Context) error {
	if !r.installed {
		return nil
	}
	return poll(ctx, 100*time.Millisecond, "the last ServiceEndpoint to be deleted", func() (bool, error) {
		var list v1alpha1.ServiceEndpointList
		err := r.getEndpoints(ctx, &list)
		return err == nil && len(list.Items) == 0, err
	})
}
