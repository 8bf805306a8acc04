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

// received is the object of an event: a ServiceEndpoint, or the metav1.Status of an error,
// whose fields a ServiceEndpoint of a later version may have as well, with other types.
type received struct {
	v1alpha1.ServiceEndpoint

	Status  json.RawMessage `json:"status"`
	Message json.RawMessage `json:"message"`
	Reason  json.RawMessage `json:"reason"`
	Details json.RawMessage `json:"details"`
	Code    json.RawMessage `json:"code"`
}

// failure is the error; what of it cannot be read is left out.
func (r *received) failure() *metav1.Status {
	s := &metav1.Status{}
	_ = json.Unmarshal(r.Status, &s.Status)
	_ = json.Unmarshal(r.Message, &s.Message)
	_ = json.Unmarshal(r.Reason, &s.Reason)
	_ = json.Unmarshal(r.Details, &s.Details)
	_ = json.Unmarshal(r.Code, &s.Code)
	return s
}
