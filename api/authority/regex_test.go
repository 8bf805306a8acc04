package authority

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// fullMatch matches as Envoy's safe_regex does: the whole text (XDS-49).
func fullMatch(tb testing.TB, expression, s string) bool {
	tb.Helper()
	re, err := regexp.Compile(`\A(?:` + expression + `)\z`)
	if err != nil {
		tb.Fatal(err)
	}
	return re.MatchString(s)
}

// The expression and the parser agree on both tables (XDS-49, XDS-65, XDS-66).
func TestMeshRegex(t *testing.T) {
	for _, tt := range goodNames {
		if !fullMatch(t, MeshRegex(domain), tt.name) {
			t.Errorf("%q must match", tt.name)
		}
	}
	for _, tt := range badNames {
		if fullMatch(t, MeshRegex(domain), tt.name) {
			t.Errorf("%q must not match", tt.name)
		}
	}
	for _, name := range []string{"PAYMENTS.aether.internal", "payments.aether.internal.", "payments.aether.internal\n"} {
		if fullMatch(t, MeshRegex(domain), name) {
			t.Errorf("%q must not match: only lower case, and Envoy strips the dot before it routes", name)
		}
	}
}

// The virtual host F:* answers 503 to a valid port and 404 to the rest (dataplane
// decision 6, XDS-65, XDS-66).
func TestPortRegex(t *testing.T) {
	for _, name := range []string{"payments.aether.internal:1", "payments.aether.internal:7777", "PAYMENTS.aether.internal:65535", "x:80", ":80"} {
		if !fullMatch(t, PortRegex(), name) {
			t.Errorf("%q must match", name)
		}
	}
	for _, name := range []string{
		"payments.aether.internal", "payments.aether.internal:", "payments.aether.internal:0", "payments.aether.internal:08080",
		"payments.aether.internal:65536", "payments.aether.internal:99999", "payments.aether.internal:123456", "payments.aether.internal:+80",
		"payments.aether.internal:80a", "payments.aether.internal:1:2", "payments.aether.internal::2", "payments.aether.internal:80 ", "8080", "",
	} {
		if fullMatch(t, PortRegex(), name) {
			t.Errorf("%q must not match", name)
		}
	}
}

// Every port is matched by the expression exactly when the parser reads it.
func TestPortRegexWholeRange(t *testing.T) {
	re := regexp.MustCompile(`\A(?:` + PortRegex() + `)\z`)
	for n := range 70_000 {
		name := "a." + domain + ":" + itoa(n)
		_, err := Parse(name, domain)
		if re.MatchString(name) != (err == nil) {
			t.Fatalf("%q: the expression and the parser (%v) disagree", name, err)
		}
	}
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

// Envoy loads the expressions under the program limit that our bootstrap sets,
// for the default domain, a long one and the longest; under its own limit of 100
// it does not, which shows that the limit is really looked at.
func TestEnvoyLoadsRegexes(t *testing.T) {
	domains := map[string]string{
		"default": domain,
		"60":      strings.Repeat("mesh-domain.", 4) + "example-net1",
		"longest": strings.Repeat("a", 62) + "." + strings.Repeat("b", MaxDomain-63),
	}
	if n := len(domains["60"]); n != 60 {
		t.Fatalf("the long domain has %d bytes", n)
	}
	for name, d := range domains {
		t.Run(name, func(t *testing.T) {
			if err := ValidateDomain(d); err != nil {
				t.Fatal(err)
			}
			if out, err := envoyValidate(t, 1000, MeshRegex(d), PortRegex()); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	out, err := envoyValidate(t, 100, MeshRegex(domain))
	if err == nil || !strings.Contains(out, "program size") {
		t.Errorf("with a limit of 100: %v\n%s", err, out)
	}
}

// envoyValidate runs `envoy --mode validate` on a route table that has the
// expressions, under the given RE2 program limit, and returns what it said.
func envoyValidate(t *testing.T, limit int, expressions ...string) (string, error) {
	t.Helper()
	envoy := os.Getenv("ENVOY")
	if envoy == "" {
		envoy = filepath.Join("..", "..", "bin", "envoy")
	}
	if _, err := os.Stat(envoy); err != nil {
		t.Fatalf("no Envoy binary: %v; put one at bin/envoy or set ENVOY", err)
	}
	type object = map[string]any
	var routes []object
	for _, expression := range expressions {
		routes = append(routes, object{
			"match": object{
				"prefix":  "/",
				"headers": []object{{"name": ":authority", "string_match": object{"safe_regex": object{"regex": expression}}}},
			},
			"direct_response": object{"status": 503},
		})
	}
	const prefix = "type.googleapis.com/envoy.extensions.filters."
	config := object{
		"layered_runtime": object{"layers": []object{{"name": "static", "static_layer": object{
			"re2.max_program_size.error_level": limit, "re2.max_program_size.warn_level": limit,
		}}}},
		"static_resources": object{"listeners": []object{{
			"name":    "l",
			"address": object{"socket_address": object{"address": "127.0.0.1", "port_value": 0}},
			"filter_chains": []object{{"filters": []object{{
				"name": "hcm",
				"typed_config": object{
					"@type":        prefix + "network.http_connection_manager.v3.HttpConnectionManager",
					"stat_prefix":  "s",
					"route_config": object{"virtual_hosts": []object{{"name": "any", "domains": []string{"*"}, "routes": routes}}},
					"http_filters": []object{{"name": "router", "typed_config": object{"@type": prefix + "http.router.v3.Router"}}},
				},
			}}}},
		}}},
	}
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "envoy.json")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), envoy, "--mode", "validate", "--log-level", "error", "-c", path).CombinedOutput()
	return string(out), err
}

func BenchmarkMeshRegex(b *testing.B) {
	re := regexp.MustCompile(`\A(?:` + MeshRegex(domain) + `)\z`)
	for b.Loop() {
		re.MatchString("payments.shop.aether.internal:9090")
	}
}
