package resource_test

import (
	"encoding/json"
	"regexp"
	"testing"

	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// What the mesh uses keeps its statistics, whatever services are called.
func TestStatistics(t *testing.T) {
	text, err := resource.Bootstrap(bootstrapParams())
	if err != nil {
		t.Fatal(err)
	}
	var bootstrap struct {
		StatsConfig struct {
			StatsMatcher struct {
				ExclusionList struct {
					Patterns []struct {
						SafeRegex struct{ Regex string } `json:"safe_regex"`
					}
				} `json:"exclusion_list"`
			} `json:"stats_matcher"`
		} `json:"stats_config"`
	}
	if err := json.Unmarshal(text, &bootstrap); err != nil {
		t.Fatal(err)
	}
	patterns := bootstrap.StatsConfig.StatsMatcher.ExclusionList.Patterns
	if len(patterns) != 1 {
		t.Fatalf("%d patterns, want 1", len(patterns))
	}
	// Envoy matches whole names.
	excluded := regexp.MustCompile("^(?:" + patterns[0].SafeRegex.Regex + ")$")
	for name, want := range map[string]bool{
		"cluster.payments_aether_internal.lb_zone_routing_sampled":                                               true,
		"cluster.payments_aether_internal.circuit_breakers.high.rq_open":                                         true,
		"cluster.payments_aether_internal.outlier_detection.ejections_enforced_success_rate":                     true,
		"cluster.payments_aether_internal.upstream_cx_http3_total":                                               true,
		"cluster.payments_aether_internal.upstream_rq_total":                                                     false,
		"cluster.payments_aether_internal.upstream_cx_connect_ms":                                                false,
		"cluster.payments_aether_internal.circuit_breakers.default.rq_open":                                      false,
		"cluster.payments_aether_internal.outlier_detection.ejections_active":                                    false,
		"cluster.payments_aether_internal.outlier_detection.ejections_enforced_consecutive_local_origin_failure": false,
		"cluster.payments_aether_internal.ssl.handshake":                                                         false,
		// Services whose names are like statistics.
		"cluster.lb_zone_aether_internal.upstream_rq_total":          false,
		"cluster.lb_subsets_aether_internal_9090.membership_healthy": false,
		"listener_manager.listener_added":                            false,
		"http.in_http.downstream_rq_total":                           false,
	} {
		if got := excluded.MatchString(name); got != want {
			t.Errorf("%s: excluded %t, want %t", name, got, want)
		}
	}
}
