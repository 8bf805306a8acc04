package app

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/publisher"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/cache"
)

// statusDoc is what `registrar status -o json` prints. Field names are stable.
type statusDoc struct {
	Version     string             `json:"version"`
	Node        string             `json:"node"`
	Started     time.Time          `json:"started"`
	Ready       bool               `json:"ready"`
	Missing     string             `json:"missing,omitempty"`
	Registry    registryStatus     `json:"registry"`
	Envoy       []envoyStatus      `json:"envoy"`
	NACKs       []nackStatus       `json:"nacks"`
	DNS         dnsStatus          `json:"dns"`
	Unknown     int                `json:"unknownNames"`
	Attachments []attachmentStatus `json:"attachments"`
	// Outside are pods that are not in the mesh, and with which something is wrong.
	Outside  []outsideStatus `json:"outside"`
	Services []serviceStatus `json:"services"`
}

type registryStatus struct {
	Backend  string `json:"backend"`
	Problem  string `json:"problem,omitempty"`
	SetAside string `json:"setAside,omitempty"`
}

type envoyStatus struct {
	Stream  string    `json:"stream"`
	Node    string    `json:"node"`
	Agent   string    `json:"agent"`
	Since   time.Time `json:"since"`
	Pending int       `json:"pending"`
	// Other: it is not an Envoy of this node, such as a tool that watches.
	Other bool `json:"other,omitempty"`
}

type nackStatus struct {
	Kind   string    `json:"kind"`
	Name   string    `json:"name"`
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
	Count  int       `json:"count"`
}

type dnsStatus struct {
	Connected bool   `json:"connected"`
	Problem   string `json:"problem,omitempty"`
	Names     int    `json:"names"`
	Pods      int    `json:"pods"`
}

type attachmentStatus struct {
	Attachment string       `json:"attachment"`
	Namespace  string       `json:"namespace"`
	Pod        string       `json:"pod"`
	Service    string       `json:"service"`
	SPIFFE     string       `json:"spiffe"`
	Addresses  []netip.Addr `json:"addresses"`
	State      string       `json:"state"`
	Ports      []portState  `json:"ports"`
	Misbound   []string     `json:"misbound,omitempty"`
	// Problems are what is wrong with the pod, as its events say.
	Problems []problem `json:"problems,omitempty"`
}

type outsideStatus struct {
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	Problems  []problem `json:"problems"`
}

type problem struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

type portState struct {
	Port      uint16 `json:"port"`
	Protocol  string `json:"protocol"`
	Listening bool   `json:"listening"`
}

type serviceStatus struct {
	Name      string       `json:"name"`
	Service   string       `json:"service"`
	Spellings []string     `json:"spellings"`
	VIPs      []netip.Addr `json:"vips"`
	Default   uint16       `json:"default"`
	Step      string       `json:"step"`
	Ports     []unionPort  `json:"ports"`
	Conflicts []string     `json:"conflicts,omitempty"`
}

type unionPort struct {
	Port       uint16 `json:"port"`
	Protocol   string `json:"protocol"`
	Advertised int    `json:"advertised"`
	Healthy    int    `json:"healthy"`
	Draining   int    `json:"draining"`
	LeftOut    int    `json:"leftOut"`
}

// exitNotReady is the exit status of `registrar status` when the registrar answers
// and could not take a pod into the mesh now.
const exitNotReady = 2

func newStatusCommand(s streams) *cobra.Command {
	var socket, output string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "print what the running registrar knows",
		Long: "Prints what the running registrar knows.\n\n" +
			"Exit status: 0 when it is ready to take pods into the mesh; 2 when it answers and is\n" +
			"not ready, which is printed all the same with what is missing; 1 when it does not\n" +
			"answer or a flag is wrong.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return fmt.Errorf("-o %q: use text or json", output)
			}
			raw, err := fetchStatus(cmd.Context(), socket)
			if err != nil {
				return err
			}
			var doc statusDoc
			if err := json.Unmarshal(raw, &doc); err != nil {
				return fmt.Errorf("read the registrar's answer: %w", err)
			}
			if output == "json" {
				_, err = s.out.Write(raw)
			} else {
				err = doc.print(s.out)
			}
			if err == nil && !doc.Ready {
				err = exitError{status: exitNotReady, err: fmt.Errorf("not ready: %s", doc.Missing)}
			}
			return err
		},
	}
	cmd.Flags().StringVar(&socket, "admin-socket", defaultAdminSocket, "where the registrar answers")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

func fetchStatus(ctx context.Context, socket string) ([]byte, error) {
	client := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://registrar/status", nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no registrar answers at %s: start `registrar run`: %w", socket, err)
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

func (d *daemon) handleStatus(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(d.status()); err != nil {
		d.log.Debug("status reader is gone", "error", err)
	}
}

func (d *daemon) status() statusDoc {
	doc := statusDoc{
		Version: Version, Node: d.cfg.Mesh.Node, Started: d.started, Missing: d.missing(),
		Registry: registryStatus{Backend: d.cfg.Registry, SetAside: d.recovery.SetAside},
		Envoy:    []envoyStatus{}, NACKs: []nackStatus{}, Attachments: []attachmentStatus{}, Outside: []outsideStatus{}, Services: []serviceStatus{},
		Unknown: d.publisher.Asked(),
	}
	doc.Ready = doc.Missing == ""
	if err := d.backend.Health(); err != nil {
		doc.Registry.Problem = err.Error()
	}
	addEnvoy(&doc, d.cache.Status())
	st := d.names.client.Status()
	doc.DNS = dnsStatus{Connected: st.Connected, Problem: st.Err, Names: st.Names, Pods: st.Pods}
	addPods(&doc, d.pods)
	for _, v := range d.publisher.Services() {
		doc.Services = append(doc.Services, serviceOf(v))
	}
	return doc
}

func addEnvoy(doc *statusDoc, st cache.Status) {
	for _, s := range st.Streams {
		e := envoyStatus{Stream: s.Service.String(), Node: s.Node, Agent: s.Agent, Since: s.Since, Other: !s.Envoy}
		for _, t := range s.Types {
			e.Pending += t.Pending
		}
		doc.Envoy = append(doc.Envoy, e)
	}
	for _, r := range st.Rejections {
		doc.NACKs = append(doc.NACKs, nackStatus{Kind: r.Key.Kind.String(), Name: r.Key.Name, Reason: r.Reason, At: r.At, Count: r.Count})
	}
}

// localPods are the pods of this node.
type localPods interface {
	Status() []attach.Status
	Outsiders() []attach.Outsider
}

func addPods(doc *statusDoc, pods localPods) {
	for _, a := range pods.Status() {
		doc.Attachments = append(doc.Attachments, attachmentOf(a))
	}
	for _, o := range pods.Outsiders() {
		doc.Outside = append(doc.Outside, outsideStatus{Namespace: o.Namespace, Pod: o.Name, Problems: problemsOf(o.Problems)})
	}
}

func attachmentOf(a attach.Status) attachmentStatus {
	out := attachmentStatus{
		Attachment: a.Pod.Key.String(), Namespace: a.Pod.Namespace, Pod: a.Pod.Name, Service: a.Pod.Service.String(),
		SPIFFE: a.Pod.Identity.SPIFFE(), Addresses: a.Pod.Addresses, State: a.Phase(), Misbound: a.Misbound, Problems: problemsOf(a.Problems), Ports: []portState{},
	}
	for _, p := range a.Pod.Ports {
		out.Ports = append(out.Ports, portState{Port: p.Number, Protocol: p.Protocol.String(), Listening: a.Listens(p.Number)})
	}
	return out
}

func problemsOf(list []attach.Problem) []problem {
	out := make([]problem, 0, len(list))
	for _, p := range list {
		out = append(out, problem{Reason: p.Reason, Message: p.Message})
	}
	return out
}

func serviceOf(v publisher.Service) serviceStatus {
	out := serviceStatus{
		Name: v.Name, Service: v.Service.String(), Spellings: v.Spellings, VIPs: []netip.Addr{v.VIP4, v.VIP6},
		Default: v.Default, Step: v.Step.String(), Conflicts: v.Conflicts, Ports: []unionPort{},
	}
	for _, p := range v.Ports {
		out.Ports = append(out.Ports, unionPort{
			Port: p.Number, Protocol: p.Protocol.String(), Advertised: p.Advertised,
			Healthy: p.Healthy, Draining: p.Draining, LeftOut: p.LeftOut,
		})
	}
	return out
}

// print writes the document for people.
func (doc statusDoc) print(w io.Writer) error {
	t := bufio.NewWriter(w)
	ready := "ready"
	if !doc.Ready {
		ready = "not ready: " + doc.Missing
	}
	paragraph(t, fmt.Sprintf("node %s, version %s, %s", doc.Node, doc.Version, ready))
	if doc.Registry.SetAside != "" {
		paragraph(t, "state was corrupt, kept at "+doc.Registry.SetAside)
	}
	if doc.Registry.Problem != "" {
		paragraph(t, "registry: "+doc.Registry.Problem)
	}
	dns := "connected"
	if !doc.DNS.Connected {
		dns = "not connected: " + doc.DNS.Problem
	}
	paragraph(t, fmt.Sprintf("mesh DNS: %d names, %d pods, %s", doc.DNS.Names, doc.DNS.Pods, dns))
	if !slices.ContainsFunc(doc.Envoy, func(e envoyStatus) bool { return !e.Other }) {
		paragraph(t, "Envoy: none is connected")
	}
	for _, e := range doc.Envoy {
		who := "Envoy"
		if e.Other {
			who = "not this node's Envoy:"
		}
		paragraph(t, fmt.Sprintf("%s %s (%s): %s stream since %s, %d pending", who, e.Node, e.Agent, e.Stream, e.Since.Format(time.RFC3339), e.Pending))
	}
	doc.printServices(t)
	doc.printPods(t)
	for _, n := range doc.NACKs {
		fmt.Fprintln(t)
		paragraph(t, fmt.Sprintf("NACK %s %s (%d times, last %s): %s", n.Kind, n.Name, n.Count, n.At.Format(time.RFC3339), n.Reason))
	}
	return t.Flush()
}

func (doc statusDoc) printServices(w io.Writer) {
	t := newTable()
	t.line(nil, "SERVICE", "NAME", "DEFAULT", "PORTS (healthy/advertised)", "VIP")
	for _, s := range doc.Services {
		ports := make([]string, 0, len(s.Ports))
		for _, p := range s.Ports {
			ports = append(ports, fmt.Sprintf("%d=%s %d/%d", p.Port, p.Protocol, p.Healthy, p.Advertised))
		}
		t.line(s.Conflicts, s.Service, s.Name, fmt.Sprint(s.Default), strings.Join(ports, ", "), fmt.Sprintf("%s, %s", s.VIPs[0], s.VIPs[1]))
	}
	t.print(w)
	if len(doc.Services) == 0 {
		fmt.Fprintln(w, "(no service yet)")
	}
}

// printPods prints a line for each pod, and under it what is wrong with it.
func (doc statusDoc) printPods(w io.Writer) {
	t := newTable()
	t.line(nil, "POD", "SERVICE", "ADDRESS", "STATE", "LISTENING")
	for _, a := range doc.Attachments {
		ports := make([]string, 0, len(a.Ports))
		for _, p := range a.Ports {
			if p.Listening {
				ports = append(ports, fmt.Sprint(p.Port))
			}
		}
		listening := strings.Join(append([]string{strings.Join(ports, ",")}, a.Misbound...), "; ")
		t.line(notes(a.Problems), a.Namespace+"/"+a.Pod, a.Service, a.Addresses[0].String(), a.State, listening)
	}
	for _, o := range doc.Outside {
		t.line(notes(o.Problems), o.Namespace+"/"+o.Pod, "-", "-", "outside", "")
	}
	t.print(w)
	if len(doc.Attachments) == 0 {
		fmt.Fprintln(w, "(no pod of this node is in the mesh)")
	}
}

func notes(problems []problem) []string {
	var all []string
	for _, p := range problems {
		all = append(all, p.Reason+": "+p.Message)
	}
	return all
}

// table is lines of columns, each with notes under it, which are as wide as they like.
type table struct {
	rows    strings.Builder
	columns *tabwriter.Writer
	// notes are by line.
	notes [][]string
}

func newTable() *table {
	t := &table{}
	t.columns = tabwriter.NewWriter(&t.rows, 0, 4, 2, ' ', 0)
	return t
}

func (t *table) line(notes []string, columns ...string) {
	fmt.Fprintln(t.columns, strings.Join(columns, "\t"))
	t.notes = append(t.notes, notes)
}

// print writes the table after an empty line.
func (t *table) print(w io.Writer) {
	_ = t.columns.Flush() // a strings.Builder takes everything
	fmt.Fprintln(w)
	for i, line := range slices.Collect(strings.Lines(t.rows.String())) {
		fmt.Fprint(w, line)
		for _, note := range t.notes[i] {
			indented(w, "  ", note)
		}
	}
}

// lineWidth is where a paragraph is wrapped.
const lineWidth = 100

// paragraph writes a text on lines of at most lineWidth characters, the later ones
// indented; a word that is longer has a line of its own.
func paragraph(w io.Writer, text string) { indented(w, "", text) }

// indented is paragraph with every line further in.
func indented(w io.Writer, indent, text string) {
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = indent + word
		case len([]rune(line))+1+len([]rune(word)) > lineWidth:
			fmt.Fprintln(w, line)
			line = indent + "  " + word
		default:
			line += " " + word
		}
	}
	fmt.Fprintln(w, line)
}
