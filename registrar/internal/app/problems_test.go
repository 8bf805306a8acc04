package app

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/portolan-mesh/portolan/registrar/internal/attach"
)

// `registrar status` has what is wrong with a pod under its line, whole, on lines that are
// not too long, and pods outside the mesh below; the columns stay in line.
func TestStatusTextOfProblems(t *testing.T) {
	long := strings.TrimSpace(strings.Repeat("nobody listens on port 9090; ", 30))
	attached := func(name string, wrong ...problem) attachmentStatus {
		return attachmentStatus{Namespace: "default", Pod: name, Service: "default/a", State: "attached", Addresses: make([]netip.Addr, 1), Ports: []portState{{Port: 8080, Listening: true}}, Problems: wrong}
	}
	doc := statusDoc{
		Ready: true,
		Attachments: []attachmentStatus{
			attached("a-1", problem{"NotListening", long}, problem{"UnknownAnnotation", "first\nsecond"}),
			attached("a-long-name-1"),
		},
		Outside: []outsideStatus{{Namespace: "default", Pod: "b-1", Problems: []problem{{"NotMeshed", "the pod uses the node's network"}}}},
	}
	_, out, _ := run("status", "--admin-socket", serveStatus(t, doc))
	_, pods, _ := strings.Cut(out, "\nPOD ")
	lines := strings.Split(strings.TrimSuffix("POD "+pods, "\n"), "\n")
	state := strings.Index(lines[0], "STATE")
	var rows []string
	var under []string // the texts under each row
	for _, line := range lines {
		if len(line) > lineWidth {
			t.Errorf("%d characters in a line: %s", len(line), line)
		}
		if text, ok := strings.CutPrefix(line, "  "); ok {
			under[len(under)-1] += " " + strings.TrimSpace(text)
			continue
		}
		name, _, _ := strings.Cut(line, " ")
		rows, under = append(rows, name+" "+strings.Fields(line[state:])[0]), append(under, "")
	}
	if got, want := strings.Join(rows, ", "), "POD STATE, default/a-1 attached, default/a-long-name-1 attached, default/b-1 outside"; got != want {
		t.Errorf("rows %q, want %q", got, want)
	}
	want := []string{"", " NotListening: " + long + " UnknownAnnotation: first second", "", " NotMeshed: the pod uses the node's network"}
	for i := range min(len(want), len(under)) {
		if under[i] != want[i] {
			t.Errorf("under %s: %q, want %q", rows[i], under[i], want[i])
		}
	}
}

// nodePods are an attached pod and one outside the mesh, with something wrong.
type nodePods struct{}

func (nodePods) Status() []attach.Status {
	return []attach.Status{{Pod: pod("c1", "10.1.0.2", ""), Problems: []attach.Problem{{Reason: "NotListening", Message: "nobody listens"}}}}
}

func (nodePods) Outsiders() []attach.Outsider {
	return []attach.Outsider{{Namespace: "shop", Name: "till-1", Problems: []attach.Problem{{Reason: "NotMeshed", Message: "no network"}}}}
}

// The document of `registrar status` has what is wrong with pods, attached or not.
func TestStatusOfProblems(t *testing.T) {
	var doc statusDoc
	addPods(&doc, nodePods{})
	if len(doc.Attachments) != 1 || !slices.Equal(doc.Attachments[0].Problems, []problem{{"NotListening", "nobody listens"}}) {
		t.Errorf("attached: %+v", doc.Attachments)
	}
	if d := cmp.Diff([]outsideStatus{{"shop", "till-1", []problem{{"NotMeshed", "no network"}}}}, doc.Outside); d != "" {
		t.Errorf("outside (-want +got):\n%s", d)
	}
}

// What is wrong with a service is under its line as well, and moves no column.
func TestStatusTextOfConflicts(t *testing.T) {
	vips := []netip.Addr{netip.MustParseAddr("240.0.0.1"), netip.MustParseAddr("fd00::1")}
	doc := statusDoc{Services: []serviceStatus{
		{Service: "shop/a", Name: "a", VIPs: vips, Conflicts: []string{strings.Repeat("port 8080 is http of one pod and tcp of another; ", 5)}},
		{Service: "shop/b", Name: "b", VIPs: vips},
	}}
	_, out, _ := run("status", "--admin-socket", serveStatus(t, doc))
	_, services, _ := strings.Cut(out, "\nSERVICE ")
	services, _, _ = strings.Cut("SERVICE "+services, "\nPOD ")
	lines := strings.Split(services, "\n")
	name := strings.Index(lines[0], "NAME")
	var names []string
	for _, line := range lines {
		if len(line) > lineWidth {
			t.Errorf("%d characters in a line: %s", len(line), line)
		}
		if line != "" && !strings.HasPrefix(line, "  ") {
			names = append(names, strings.Fields(line[name:])[0])
		}
	}
	if got := strings.Join(names, " "); got != "NAME a b" || len(lines) < 5 {
		t.Errorf("names in their column are %q:\n%s", got, services)
	}
}
