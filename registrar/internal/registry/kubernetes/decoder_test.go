package kubernetes

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/watch"
	restwatch "k8s.io/client-go/rest/watch"

	"github.com/portolan-mesh/portolan/api/endpoint/v1alpha1"
	"github.com/portolan-mesh/portolan/registrar/internal/registry/registrytest"
)

// libraryDecoder is the decoder of a rest.RESTClient.
func libraryDecoder(tb testing.TB, stream []byte) watch.Decoder {
	tb.Helper()
	scheme := runtime.NewScheme()
	must(tb, v1alpha1.AddToScheme(scheme))
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	codecs := serializer.NewCodecFactory(scheme).WithoutConversion()
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	if !ok {
		tb.Fatal("no serializer for JSON")
	}
	frames := info.StreamSerializer.NewFrameReader(io.NopCloser(bytes.NewReader(stream)))
	return restwatch.NewDecoder(streaming.NewDecoder(frames, info.StreamSerializer.Serializer), codecs.DecoderToVersion(info.Serializer, v1alpha1.GroupVersion()))
}

// event is what an API server sends.
func event(tb testing.TB, kind watch.EventType, object any) []byte {
	tb.Helper()
	raw, err := json.Marshal(object)
	must(tb, err)
	line, err := json.Marshal(metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: raw}})
	must(tb, err)
	return append(line, '\n')
}

// stored is an object as the API server has it.
func stored(tb testing.TB) *v1alpha1.ServiceEndpoint {
	tb.Helper()
	object, err := objectOf(registrytest.Endpoint("a-eth0", 1_700_000_000_000_000_001), "payments.shop.aether.internal")
	must(tb, err)
	object.UID, object.ResourceVersion, object.Generation = "4c0b6ad5-0000-4000-8000-000000000002", "4711", 3
	object.CreationTimestamp = metav1.Unix(1_700_000_000, 0)
	object.ManagedFields = []metav1.ManagedFieldsEntry{{
		Manager: fieldManager, Operation: metav1.ManagedFieldsOperationApply, APIVersion: v1alpha1.GroupVersion().String(),
		Time: &metav1.Time{Time: time.Unix(1_700_000_000, 0)}, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:spec":{}}`),
	}}
	return object
}

// later is an object as a later version may have it.
type later struct {
	*v1alpha1.ServiceEndpoint

	Status  map[string]int `json:"status"`
	Message []string       `json:"message"`
	Reason  int            `json:"reason"`
	Details string         `json:"details"`
	Code    string         `json:"code"`
}

// Every event of a watch is what client-go's own decoder makes of it, and what is not known
// of an object is ignored.
func TestDecoder(t *testing.T) {
	bookmark := &v1alpha1.ServiceEndpoint{TypeMeta: stored(t).TypeMeta}
	bookmark.ResourceVersion, bookmark.Annotations = "5000", map[string]string{metav1.InitialEventsAnnotationKey: "true"}
	expired := apierrors.NewResourceExpired("too old resource version").ErrStatus
	expired.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	expired.Details = &metav1.StatusDetails{RetryAfterSeconds: 3}
	stream := bytes.Join([][]byte{
		event(t, watch.Added, stored(t)), event(t, watch.Modified, stored(t)), event(t, watch.Deleted, stored(t)),
		event(t, watch.Modified, later{ServiceEndpoint: stored(t), Status: map[string]int{"seen": 1}, Code: "a"}),
		event(t, watch.Bookmark, bookmark), event(t, watch.Error, expired),
	}, nil)
	ours, theirs := newDecoder(io.NopCloser(bytes.NewReader(stream))), libraryDecoder(t, stream)
	for range 6 {
		kind, object, err := ours.Decode()
		must(t, err)
		wantKind, want, err := theirs.Decode()
		must(t, err)
		if d := cmp.Diff(want, object); d != "" || kind != wantKind {
			t.Errorf("%s, want %s, -want +got:\n%s", kind, wantKind, d)
		}
	}
	if _, _, err := ours.Decode(); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}

// What is no event is an error, and nothing that a reader would take for one.
func TestDecoderRefuses(t *testing.T) {
	for name, stream := range map[string]string{
		"cut off":      `{"type":"ADDED","object":{"metadata":{"name":"a"`,
		"no JSON":      `<html>`,
		"unknown type": `{"type":"RENAMED","object":{}}`,
		"no type":      `{"object":{}}`,
		"wrong object": `{"type":"ADDED","object":"a"}`,
	} {
		if kind, object, err := newDecoder(io.NopCloser(strings.NewReader(stream))).Decode(); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: %s %v, %v", name, kind, object, err)
		}
	}
}

func FuzzDecoder(f *testing.F) {
	f.Add(event(f, watch.Added, stored(f)))
	f.Add(event(f, watch.Error, apierrors.NewResourceExpired("too old").ErrStatus))
	f.Fuzz(func(t *testing.T, stream []byte) {
		d := newDecoder(io.NopCloser(bytes.NewReader(stream)))
		for {
			_, object, err := d.Decode()
			if err != nil {
				return
			}
			switch o := object.(type) {
			case *v1alpha1.ServiceEndpoint:
				_, _, _ = recordOf(o)
			case *metav1.Status:
				_ = apierrors.FromObject(o).Error()
			default:
				t.Fatalf("decoded a %T", object)
			}
		}
	})
}

// BenchmarkDecode compares with the decoder of client-go.
func BenchmarkDecode(b *testing.B) {
	one := event(b, watch.Modified, stored(b))
	all := bytes.Repeat(one, 100)
	for name, decoder := range map[string]func() watch.Decoder{
		"ours":      func() watch.Decoder { return newDecoder(io.NopCloser(bytes.NewReader(all))) },
		"client-go": func() watch.Decoder { return libraryDecoder(b, all) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(all)))
			for b.Loop() {
				d := decoder()
				for range 100 {
					if _, _, err := d.Decode(); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
