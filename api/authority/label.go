package authority

import (
	"fmt"
	"strings"
)

const (
	// maxLabel is the longest DNS label, in bytes (RFC 1035, 2.3.4).
	maxLabel = 63
	// maxName is the longest DNS name in its textual form, in bytes.
	maxName = 253
	// MaxDomain is the longest mesh domain, in bytes: two labels of full length
	// under it are still a DNS name.
	MaxDomain = maxName - 2*(maxLabel+1)
)

// ValidLabel says whether s is a DNS label as the mesh uses it: 1 to 63 bytes of
// lower-case ASCII letters, digits and hyphens, no hyphen at either end.
func ValidLabel(s string) bool {
	for i := range len(s) {
		if 'A' <= s[i] && s[i] <= 'Z' {
			return false
		}
	}
	return validFold(s)
}

// validFold is ValidLabel with upper-case letters allowed.
func validFold(s string) bool {
	if s == "" || len(s) > maxLabel || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		switch c := lowerByte(s[i]); {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-':
		default:
			return false
		}
	}
	return true
}

// ValidateDomain says whether domain can be a mesh domain: DNS labels joined by
// dots, lower case, no dot at the ends, at most MaxDomain bytes, and not ending
// in a number, so that no IPv4 address lies under it.
func ValidateDomain(domain string) error {
	if domain == "" {
		return fmt.Errorf("mesh domain is empty; use a name such as aether.internal")
	}
	if len(domain) > MaxDomain {
		return fmt.Errorf("mesh domain of %d bytes is too long; at most %d leave room for service and namespace", len(domain), MaxDomain)
	}
	last := ""
	for label := range strings.SplitSeq(domain, ".") {
		if !ValidLabel(label) {
			return fmt.Errorf("mesh domain %q: %q is no DNS label (a-z, 0-9 and \"-\" inside, 1-63 bytes)", domain, label)
		}
		last = label
	}
	if strings.Trim(last, "0123456789") == "" {
		return fmt.Errorf("mesh domain %q ends in a number, like an IP address; its last label needs a letter", domain)
	}
	return nil
}
