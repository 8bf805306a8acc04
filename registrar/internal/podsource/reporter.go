package podsource

import (
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// component is who the events come from.
	component = "portolan"
	// maxMessage is the API server's limit of an event's message, in bytes.
	maxMessage = 1024
)

// Reporter writes warnings as events of pods, for `kubectl describe pod`. Equal ones
// are counted in one event, and a flood is cut.
type Reporter struct {
	broadcaster record.EventBroadcaster
	recorder    record.EventRecorder
}

// NewReporter returns a Reporter of one node that writes until Close.
func NewReporter(client kubernetes.Interface, node string) *Reporter {
	b := record.NewBroadcaster()
	b.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	return &Reporter{broadcaster: b, recorder: b.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component, Host: node})}
}

// Report writes one warning about a pod; it does not wait for the API server.
func (r *Reporter) Report(w model.Workload, reason, message string) {
	pod := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: w.Namespace, Name: w.Name, UID: types.UID(w.ObjectUID)}
	r.recorder.Event(pod, corev1.EventTypeWarning, reason, cut(message))
}

// Close lets what was reported be written and ends.
func (r *Reporter) Close() { r.broadcaster.Shutdown() }

// cut shortens a message to what the API server takes, between two characters.
func cut(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	end := maxMessage
	for !utf8.RuneStart(message[end]) {
		end--
	}
	return message[:end]
}
