package projection

import (
	"fmt"
	"net/netip"
	"testing"
)

// Config.Validate names the setting and the remedy.
func TestConfigValidate(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		spoil      func(*Config)
	}{
		{"good", "", func(*Config) {}},
		{"no flat namespaces", "", func(c *Config) { c.FlatNamespaces = nil }},
		{"domain", "mesh domain is empty; use a name such as aether.internal", func(c *Config) { c.Domain = "" }},
		{"flat", `flat namespace "A" is no DNS label`, func(c *Config) { c.FlatNamespaces = []string{"A"} }},
		{"flat twice", `flat namespace "a" is listed twice; list each once, the first wins`, func(c *Config) { c.FlatNamespaces = []string{"a", "b", "a"} }},
		{"v4", "virtual IPv4 range invalid Prefix is no IPv4 prefix; use one such as 198.18.0.0/15", func(c *Config) { c.VIP4 = netip.Prefix{} }},
		{"v4 is v6", "virtual IPv4 range fd00::/64 is no IPv4 prefix; use one such as 198.18.0.0/15", func(c *Config) { c.VIP4 = netip.MustParsePrefix("fd00::/64") }},
		{"v4 small", "virtual IPv4 range 198.18.0.0/31: the prefix length must be 8 to 30", func(c *Config) { c.VIP4 = netip.MustParsePrefix("198.18.0.0/31") }},
		{"v4 large", "virtual IPv4 range 0.0.0.0/7: the prefix length must be 8 to 30", func(c *Config) { c.VIP4 = netip.MustParsePrefix("0.0.0.0/7") }},
		{"v6", "virtual IPv6 range 10.0.0.0/8 is no IPv6 prefix; use one such as fd70:6f72:746f::/64", func(c *Config) { c.VIP6 = netip.MustParsePrefix("10.0.0.0/8") }},
		{"v6 small", "virtual IPv6 range fd00::/112 is smaller than the IPv4 range 198.18.0.0/15", func(c *Config) { c.VIP6 = netip.MustParsePrefix("fd00::/112") }},
		{"v4 bits", "virtual range 198.18.0.1/15 has bits set behind its prefix; use 198.18.0.0/15", func(c *Config) { c.VIP4 = netip.MustParsePrefix("198.18.0.1/15") }},
		{"cap", "cap of 0 unknown names; it must be at least 1", func(c *Config) { c.UnknownCap = 0 }},
		{"retention", "retention of 0s; it must be longer than 0", func(c *Config) { c.Retention = 0 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := testConfig()
			tt.spoil(&cfg)
			err := cfg.Validate()
			if got := fmt.Sprint(err); got != tt.want && (tt.want != "" || err != nil) {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
			if _, newErr := New(cfg, nil, t0); (newErr == nil) != (err == nil) {
				t.Errorf("New: %v", newErr)
			}
		})
	}
}
