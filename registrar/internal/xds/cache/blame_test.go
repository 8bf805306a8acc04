package cache

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// blameTests are texts that Envoy 1.40 sends, or may send, with names of ours.
var blameTests = []struct {
	name, text string
	names      []string
	want       []bool
}{
	{
		name:  "listener",
		text:  "Error adding/updating listener(s) in_b: failed to open netns file /run/netns/in_c: No such file or directory\n",
		names: []string{"in_b", "in_bb", "in_c2", "b"},
		want:  []bool{true, false, false, false},
	},
	{
		name:  "two clusters",
		text:  "Error adding/updating cluster(s) payments.aether.internal:9090: bad, app_b_80: also bad",
		names: []string{"payments.aether.internal", "payments.aether.internal:9090", "payments.aether.internal:909", "app_b_8080", "app_b_80"},
		want:  []bool{false, true, false, false, true},
	},
	{
		name:  "name before a colon",
		text:  "payments.aether.internal: route: unknown cluster 'app_b_8080'",
		names: []string{"payments.aether.internal", "app_b_8080", "aether.internal", "payments"},
		want:  []bool{true, true, false, false},
	},
	{
		name:  "duplicate",
		text:  "duplicate name spiffe://td/ns/default/sa/pay in the union of added+removed",
		names: []string{"spiffe://td/ns/default/sa/pay", "spiffe://td/ns/default/sa/payments", "spiffe://td"},
		want:  []bool{true, false, false},
	},
	{
		name:  "longer name first, shorter one by itself later",
		text:  "in|x.y: bad, in|x: bad",
		names: []string{"in|x", "in|x.y"},
		want:  []bool{true, true},
	},
	{
		name:  "parts joined by a bar",
		text:  "Error adding/updating cluster(s) app|c1-eth0|8080: no",
		names: []string{"app|c1-eth0|8080", "app|c1-eth0", "app|c1-eth0|80", "c1-eth0", "c1-eth0|8080"},
		want:  []bool{true, false, false, false, false},
	},
	{name: "no name", text: byDecodingText, names: []string{"a", "Listener", "Proto.x"}, want: []bool{false, false, false}},
	{name: "ends the text", text: "bad: a.b", names: []string{"a.b", "a"}, want: []bool{true, false}},
	{name: "full stop", text: "cannot add a.b.", names: []string{"a.b"}, want: []bool{true}},
	{name: "empty", text: "", names: []string{"", "a"}, want: []bool{false, false}},
}

const byDecodingText = "Proto constraint validation failed (ListenerValidationError.Address: value is required)"

// The resource that a rejection names is found, and no other whose name is a
// part of it (XDS-R9, XDS-R10).
func TestNamesIn(t *testing.T) {
	for _, test := range blameTests {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, namesIn(test.text, test.names)); diff != "" {
				t.Errorf("names found (-want +got):\n%s", diff)
			}
		})
	}
}

// Whatever an Envoy writes, blame neither fails nor finds a name that is not in
// the text.
func FuzzNamesIn(f *testing.F) {
	for _, test := range blameTests {
		f.Add(test.text, strings.Join(test.names, "\n"))
	}
	f.Fuzz(func(t *testing.T, text, list string) {
		names := strings.Split(list, "\n")
		for i, found := range namesIn(text, names) {
			if found && (names[i] == "" || !strings.Contains(text, names[i])) {
				t.Errorf("found %q, which is not in %q", names[i], text)
			}
		}
	})
}
