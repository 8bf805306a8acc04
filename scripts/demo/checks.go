package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/scripts/node"
)

const payments = "payments.aether.internal"

// atOnce is the upper bound of a refusal "at once": well below the 2 s after
// which Envoy gives a question to the control plane up.
const atOnce = time.Second

// checks are what a user would try, in the order in which it is shown.
func (sc *scene) checks() []check {
	return []check{
		sc.curl(want{status: 200, port: 8080}, "http://"+payments+"/"),
		sc.curl(want{status: 200, port: 8080}, "http://"+payments+":8080/"),
		sc.grpc(payments + ":9090"),
		sc.tcp(payments + ":5432"),
		sc.curl(want{status: 503}, "http://"+payments+":7777/"),
		sc.curl(want{status: 503}, "http://"+payments+":7777/").called("again"),
		sc.lookup("ghost.aether.internal", ""),
		sc.curl(want{status: 503}, "-H", "Host: ghost.aether.internal", "http://"+payments+"/"),
		sc.curl(want{status: 404}, "-H", "Host: evil.com", "http://"+payments+"/"),
		sc.spread("http://"+payments+"/", 40, sc.both, sc.plain),
		sc.spread("http://"+payments+":9090/", 40, sc.both),
		sc.containers(),
		sc.badAnnotation("8080,http", `"http"`),
		sc.lookup(node.OutsideName, node.WebIP),
		sc.outside(),
		sc.deletion(),
	}
}

// want is an expected HTTP answer: of the pods' port, or, when port is 0, of
// nobody and at once.
type want struct {
	status int
	port   uint16
}

func (w want) String() string {
	if w.port == 0 {
		return fmt.Sprintf("%d at once", w.status)
	}
	return fmt.Sprintf("%d from port %d", w.status, w.port)
}

// curl asks by the machine's curl from the client pod.
func (sc *scene) curl(want want, args ...string) check {
	return check{
		asked:    shell("curl", args),
		expected: want.String(),
		ask: func(ctx context.Context) (string, bool) {
			got, err := sc.client.Curl(ctx, args...)
			if err != nil {
				return err.Error(), false
			}
			received := fmt.Sprintf("%s, %d ms", got, got.Took.Milliseconds())
			return received, got.Status == want.status && got.Echo.Port == want.port && (want.port != 0 || got.Took < atOnce)
		},
	}
}

// grpc calls the standard health service by grpc-go.
func (sc *scene) grpc(target string) check {
	return check{
		asked:    "grpc " + target + " grpc.health.v1.Health/Check",
		expected: "SERVING from port 9090",
		ask: func(ctx context.Context) (string, bool) {
			got, err := sc.client.GRPC(ctx, target)
			if err != nil {
				return err.Error(), false
			}
			if got.Code != "OK" {
				return got.Code + " " + got.Message, false
			}
			return got.Health + " " + got.String(), got.Health == "SERVING" && got.Port == 9090 && got.Authority == target
		},
	}
}

// tcp speaks a protocol in which the server begins.
func (sc *scene) tcp(target string) check {
	return check{
		asked:    "nc " + target + " <<< hello",
		expected: "the banner of port 5432, hello",
		ask: func(ctx context.Context) (string, bool) {
			got, err := sc.client.TCP(ctx, target, "hello")
			if err != nil {
				return err.Error(), false
			}
			received := fmt.Sprintf("%q, %q %s", got.Banner, got.Echo, got.Error)
			return received, got.Banner == "hello from payments-1 port 5432" && got.Echo == "hello" && got.Error == ""
		},
	}
}

// lookup asks the pod's resolver; address is "" for a name that must not exist.
func (sc *scene) lookup(name, address string) check {
	return check{
		asked:    "dig " + name,
		expected: cmp.Or(address, "NXDOMAIN"),
		ask: func(ctx context.Context) (string, bool) {
			got, err := sc.client.Lookup(ctx, name)
			if err != nil {
				return err.Error(), false
			}
			if address == "" {
				return got.Rcode, got.Rcode == "NXDOMAIN"
			}
			return fmt.Sprint(got.Rcode, " ", got.Addresses), slices.Equal(got.Addresses, []string{address})
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
	args := []string{"-n", strconv.Itoa(requests), "-keepalive=false"}
	if strings.Contains(url, ":9090") {
		args = append(args, "-h2")
	}
	return check{
		asked:    fmt.Sprintf("%s, %d times", url, requests),
		expected: "only " + strings.Join(names, " and "),
		ask: func(ctx context.Context) (string, bool) {
			got, err := sc.client.Get(ctx, append(args, url)...)
			if err != nil {
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
	const expected = "web 8080, ledger 9090"
	return check{
		asked:    "which container of payments-1 owns 8080, which 9090",
		expected: expected,
		ask: func(ctx context.Context) (string, bool) {
			var received []string
			for _, args := range [][]string{{"http://" + payments + "/"}, {"--http2-prior-knowledge", "http://" + payments + ":9090/"}} {
				// The default port is also served by payments-2: ask until the right pod answers.
				for range 100 {
					got, err := sc.client.Curl(ctx, args...)
					if err != nil {
						return err.Error(), false
					}
					if got.Echo.Pod == sc.both.Spec.Name {
						received = append(received, fmt.Sprintf("%s %d", got.Echo.Container, got.Echo.Port))
						break
					}
				}
			}
			text := strings.Join(received, ", ")
			return text, text == expected
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
			if code == 0 {
				return err.Error(), false
			}
			return fmt.Sprintf("%d: %s", code, text), code == 102 && strings.Contains(text, keyPorts) && strings.Contains(text, named)
		},
	}
}

// outside asks a server that is not in the mesh.
func (sc *scene) outside() check {
	url := "http://" + node.OutsideName + "/"
	return check{
		asked:    "curl -4 " + url,
		expected: "straight from the pod's address",
		ask: func(ctx context.Context) (string, bool) {
			// The name has an IPv6 address, too, and so has the pod.
			out, err := sc.client.Exec(ctx, "curl", "-4", "-sS", "--max-time", "10", url)
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
