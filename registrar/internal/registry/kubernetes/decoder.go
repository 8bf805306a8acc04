package kubernetes

import (
	"encoding/json"
	"fmt"
	"io"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
)

// decoder reads the events of a watch of ServiceEndpoints: a watch.Decoder. It scans an
// event twice. The decoder of a rest.RESTClient, which finds out the kind first, does so
// seven times, and was a quarter of what a registrar did for a change.
type decoder struct {
	stream io.ReadCloser
	json   *json.Decoder
}

func newDecoder(stream io.ReadCloser) *decoder {
	return &decoder{stream: stream, json: json.NewDecoder(stream)}
}

// Decode implements watch.Decoder.
func (d *decoder) Decode() (watch.EventType, runtime.Object, error) {
	var event struct {
		Type   watch.EventType `json:"type"`
		Object received        `json:"object"`
	}
	if err := d.json.Decode(&event); err != nil {
		return "", nil, err
	}
	switch event.Type {
	case watch.Added, watch.Modified, watch.Deleted, watch.Bookmark:
		event.Object.TypeMeta = metav1.TypeMeta{} // its Go type says it
		return event.Type, &event.Object.ServiceEndpoint, nil
	case watch.Error:
		return event.Type, event.Object.failure(), nil
	}
	return "", nil, fmt.Errorf("the API server sent an event of the unknown type %.32q", string(event.Type))
}

// Close implements watch.Decoder.
func (d *decoder) Close() { _ = d.stream.Close() }

// received is the object of an event: a ServiceEndpoint, or the metav1.Status of an error.
type received struct {
	v1alpha1.ServiceEndpoint

	Status  string                `json:"status"`
	Message string                `json:"message"`
	Reason  metav1.StatusReason   `json:"reason"`
	Details *metav1.StatusDetails `json:"details"`
	Code    int32                 `json:"code"`
}

func (r *received) failure() *metav1.Status {
	return &metav1.Status{Status: r.Status, Message: r.Message, Reason: r.Reason, Details: r.Details, Code: r.Code}
}
