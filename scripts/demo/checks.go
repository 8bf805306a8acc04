package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/portolan-mesh/portolan/scripts/node"
)

const payments = "payments.aether.internal"

// atOnceMillis is the upper bound of a refusal "at once": well below the 2 s
// after which a question to the control plane would have been given up.
const atOnceMillis = 1000

// checks are what a user would try, in the order in which it is shown.
func (sc *scene) checks() []check {
	return []check{
		sc.curl(reply{status: 200, port: 8080}, "http://"+payments+"/"),
		sc.curl(reply{status: 200, port: 8080}, "http://"+payments+":8080/"),
		sc.grpc(payments + ":9090"),
		sc.tcp(payments + ":5432"),
		sc.curl(reply{status: 503}, "http://"+payments+":7777/"),
		sc.curl(reply{status: 503}, "http://"+payments+":7777/"),
		sc.lookup("ghost.aether.internal", lookup{Rcode: "NXDOMAIN"}),
		sc.curl(reply{status: 503}, "-H", "Host: ghost.aether.internal", "http://"+payments+"/"),
		sc.curl(reply{status: 404}, "-H", "Host: evil.com", "http://"+payments+"/"),
		sc.spread("http://"+payments+"/", 40, sc.both, sc.plain),
		sc.spread("http://"+payments+":9090/", 40, sc.both),
		sc.containers(),
		sc.badAnnotation("8080,http", `"http"`),
		sc.lookup(node.OutsideName, lookup{Rcode: "NOERROR", Addresses: []string{node.WebIP}}),
		sc.outside(),
		sc.deletion(),
	}
}

// reply is an HTTP answer. A zero field of an expected one is not looked at.
type reply struct {
	status    int
	pod       string
	port      int
	container string
	millis    int
}

func (r reply) String() string {
	s := strconv.Itoa(r.status)
	if r.port != 0 {
		s += " from port " + strconv.Itoa(r.port)
	}
	if r.pod != "" {
		s += " of " + r.pod
	}
	if r.status != 200 {
		s += " at once"
	}
	return s
}

// curl asks by the machine's curl from the client pod.
func (sc *scene) curl(want reply, args ...string) check {
	return check{
		asked:    shell("curl", args),
		expected: want.String(),
		ask: func(ctx context.Context) (string, bool) {
			got, err := curl(ctx, sc.client, args...)
			if err != nil {
				return err.Error(), false
			}
			received := strconv.Itoa(got.status)
			if got.pod != "" {
				received += fmt.Sprintf(" from port %d of %s", got.port, got.pod)
			}
			received += fmt.Sprintf(", %d ms", got.millis)
			ok := got.status == want.status && got.port == want.port && (got.status == 200 || got.millis < atOnceMillis)
			return received, ok
		},
	}
}

// curl runs curl and reads which server answered.
func curl(ctx context.Context, from *node.Pod, args ...string) (reply, error) {
	argv := append([]string{"curl", "-sS", "--max-time", "10", "-w", "\n%{http_code} %{time_total}"}, args...)
	out, err := from.Exec(ctx, argv...)
	if err != nil {
		return reply{}, err
	}
	at := strings.LastIndexByte(out, '\n')
	var r reply
	var seconds float64
	if _, err := fmt.Sscanf(out[at+1:], "%d %g", &r.status, &seconds); err != nil {
		return reply{}, fmt.Errorf("read what curl printed, %q: %w", out, err)
	}
	r.millis = int(seconds * 1000)
	var body struct {
		Pod, Container string
		Port           int
	}
	// Envoy's own answers have no JSON body: they come from no pod.
	if json.Unmarshal([]byte(out[:at]), &body) == nil {
		r.pod, r.port, r.container = body.Pod, body.Port, body.Container
	}
	return r, nil
}

// grpc calls the standard health service by grpc-go.
func (sc *scene) grpc(target string) check {
	return check{
		asked:    "grpc " + target + " grpc.health.v1.Health/Check",
		expected: "SERVING from port 9090",
		ask: func(ctx context.Context) (string, bool) {
			var got struct{ Code, Message, Health, Pod, Port, Authority string }
			if err := ask(ctx, sc.client, &got, "grpc", target); err != nil {
				return err.Error(), false
			}
			if got.Code != "OK" {
				return got.Code + " " + got.Message, false
			}
			received := fmt.Sprintf("%s from port %s of %s", got.Health, got.Port, got.Pod)
			return received, got.Health == "SERVING" && got.Port == "9090" && got.Authority == target
		},
	}
}

// tcp speaks a protocol in which the server begins.
func (sc *scene) tcp(target string) check {
	return check{
		asked:    "nc " + target + " <<< hello",
		expected: "the banner of port 5432, hello",
		ask: func(ctx context.Context) (string, bool) {
			var got struct{ Banner, Echo, Error string }
			if err := ask(ctx, sc.client, &got, "tcp", target, "hello"); err != nil {
				return err.Error(), false
			}
			received := fmt.Sprintf("%q, %q %s", got.Banner, got.Echo, got.Error)
			return received, got.Banner == "hello from payments-1 port 5432" && got.Echo == "hello" && got.Error == ""
		},
	}
}

// lookup is a DNS answer.
type lookup struct {
	Rcode     string
	Addresses []string
}

func (l lookup) String() string {
	if l.Rcode == "NOERROR" {
		return strings.Join(l.Addresses, " ")
	}
	return l.Rcode
}

func (sc *scene) lookup(name string, want lookup) check {
	return check{
		asked:    "dig " + name,
		expected: want.String(),
		ask: func(ctx context.Context) (string, bool) {
			var got lookup
			if err := ask(ctx, sc.client, &got, "lookup", name); err != nil {
				return err.Error(), false
			}
			return got.String(), got.Rcode == want.Rcode && slices.Equal(got.Addresses, append([]string{}, want.Addresses...))
		},
	}
}

// spread sends requests, each on a connection of its own, and looks at which
// pods they reach: all of pods, and no other.
func (sc *scene) spread(url string, requests int, pods ...*node.Pod) check {
	names := make([]string, len(pods))
	for i, p := range pods {
		names[i] = p.Spec.Name
	}
	args := []string{"get", "-n", strconv.Itoa(requests), "-keepalive=false", url}
	if strings.Contains(url, ":9090") {
		args = slices.Insert(args, 1, "-h2")
	}
	return check{
		asked:    fmt.Sprintf("%s, %d times", url, requests),
		expected: "only " + strings.Join(names, " and "),
		ask: func(ctx context.Context) (string, bool) {
			var got struct{ Answers map[string]int }
			if err := ask(ctx, sc.client, &got, args...); err != nil {
				return err.Error(), false
			}
			reached := make(map[string]bool)
			var received []string
			for _, answer := range slices.Sorted(maps.Keys(got.Answers)) {
				received = append(received, fmt.Sprintf("%d x %s", got.Answers[answer], answer))
				pod, _, _ := strings.Cut(strings.TrimPrefix(answer, "200 "), ":")
				reached[pod] = true
			}
			return strings.Join(received, ", "), slices.Equal(slices.Sorted(maps.Keys(reached)), names)
		},
	}
}

// containers asks both containers of one pod, each on its own port.
func (sc *scene) containers() check {
	return check{
		asked:    "which container of payments-1 owns 8080, which 9090",
		expected: "web 8080, ledger 9090",
		ask: func(ctx context.Context) (string, bool) {
			var received []string
			for _, args := range [][]string{{"http://" + payments + "/"}, {"--http2-prior-knowledge", "http://" + payments + ":9090/"}} {
				// The default port is also served by payments-2: ask until the right pod answers.
				for range 100 {
					got, err := curl(ctx, sc.client, args...)
					if err != nil {
						return err.Error(), false
					}
					if got.pod == sc.both.Spec.Name {
						received = append(received, fmt.Sprintf("%s %d", got.container, got.port))
						break
					}
				}
			}
			text := strings.Join(received, ", ")
			return text, text == "web 8080, ledger 9090"
		},
	}
}

// badAnnotation adds a pod whose ports cannot be read.
func (sc *scene) badAnnotation(value, named string) check {
	return check{
		asked:    fmt.Sprintf("ADD of a pod with %s=%q", keyPorts, value),
		expected: "CNI error 102 naming it",
		ask: func(ctx context.Context) (string, bool) {
			_, err := sc.node.AddPod(ctx, node.PodSpec{Name: "bad", Annotations: map[string]string{keyPorts: value}})
			if err == nil {
				return "the pod was added", false
			}
			code, text := node.CNIError(err)
			return fmt.Sprintf("%d: %s", code, text), code == 102 && strings.Contains(text, keyPorts) && strings.Contains(text, named)
		},
	}
}

// outside asks a server that is not in the mesh.
func (sc *scene) outside() check {
	url := "http://" + node.OutsideName + "/"
	return check{
		asked:    "curl " + url,
		expected: "straight from the pod's address",
		ask: func(ctx context.Context) (string, bool) {
			out, err := sc.client.Exec(ctx, "curl", "-sS", "--max-time", "10", url)
			if err != nil {
				return err.Error(), false
			}
			var got struct{ Outside, Remote, XFCC string }
			if err := json.Unmarshal([]byte(out), &got); err != nil {
				return out, false
			}
			return "asked by " + got.Remote, strings.HasPrefix(got.Remote, sc.client.IP().String()+":") && got.XFCC == ""
		},
	}
}

// deletion deletes a pod and looks for what is left of it.
func (sc *scene) deletion() check {
	url := "http://" + payments + "/"
	return check{
		asked:    "DEL of payments-2, then " + url + ", 20 times",
		expected: "only payments-1, nothing left",
		ask: func(ctx context.Context) (string, bool) {
			if err := sc.plain.Delete(ctx); err != nil {
				return err.Error(), false
			}
			received, ok := sc.spread(url, 20, sc.both).ask(ctx)
			pins, err := sc.node.Pins()
			if err != nil {
				return err.Error(), false
			}
			if slices.ContainsFunc(pins, func(pin string) bool { return strings.HasPrefix(pin, sc.plain.ContainerID) }) {
				return received + ", and its network namespace is still held", false
			}
			return received, ok
		},
	}
}

// ask runs a client of podserver in the pod and decodes what it printed.
func ask(ctx context.Context, from *node.Pod, into any, args ...string) error {
	out, err := from.Podserver(ctx, args...)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), into); err != nil {
		return fmt.Errorf("read %q: %w", out, err)
	}
	return nil
}

// shell is a command as a user would type it.
func shell(name string, args []string) string {
	words := []string{name}
	for _, arg := range args {
		if strings.ContainsRune(arg, ' ') {
			arg = "'" + arg + "'"
		}
		words = append(words, arg)
	}
	return strings.Join(words, " ")
}
