package kubetest

import (
	"strings"
	"testing"
)

// TestSilentPort: who advertises a port that nothing listens on is told so, and how to
// mend it; the other port serves.
func TestSilentPort(t *testing.T) {
	const namespace = "silent"
	c := scenario(t, namespace)
	c.apply(t, namespace, clients)
	c.apply(t, namespace, barePod("half", map[string]string{"endpoint.aether.io/service": "half", "endpoint.aether.io/ports": "8080,9099"}))
	callers := c.awaitPods(t, namespace, "app=client", nodes)
	event := c.awaitEvent(t, namespace, "half", "NotListening", "port 9099")
	if strings.Contains(event, "and 9099") {
		t.Errorf("the event blames a port that is listened on: %s", event)
	}
	for i := range callers {
		c.mustAnswer(t, &callers[i], "half", namespace)
	}
	checked(t, "the event of the pod: %s", event)
}
