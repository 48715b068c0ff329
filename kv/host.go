package kv

import (
	"net/netip"
	"strings"
)

// BareHost is a host without the brackets of an IPv6 literal, as parameters, metadata and
// net.JoinHostPort have it.
func BareHost(host string) string {
	if inner, ok := strings.CutPrefix(host, "["); ok {
		return strings.TrimSuffix(inner, "]")
	}
	return host
}

// OwnHost tells whether a host is one by which every host means itself: a loopback or unspecified
// address, or localhost. Other names are not looked up.
func OwnHost(host string) bool {
	host = BareHost(host)
	if name := strings.TrimSuffix(strings.ToLower(host), "."); name == "localhost" || strings.HasSuffix(name, ".localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return false
	}
	a = a.Unmap()
	return a.IsLoopback() || a.IsUnspecified()
}
