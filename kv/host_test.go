package kv

import "testing"

func TestBareHost(t *testing.T) {
	for host, want := range map[string]string{
		"": "", "p1": "p1", "10.0.0.5": "10.0.0.5", "::1": "::1", "[::1]": "::1", "[fe80::1%eth0]": "fe80::1%eth0", "[::1": "::1",
	} {
		if got := BareHost(host); got != want {
			t.Errorf("BareHost(%q) = %q, want %q", host, got, want)
		}
	}
}

func TestOwnHost(t *testing.T) {
	for host, want := range map[string]bool{
		"127.0.0.1": true, "127.9.9.9": true, "::1": true, "[::1]": true, "0.0.0.0": true, "::": true, "[::]": true,
		"::ffff:127.0.0.1": true, "localhost": true, "LocalHost.": true, "p.localhost": true,
		"": false, "10.0.0.5": false, "fd00::2": false, "[fe80::1%eth0]": false, "notlocalhost": false, "host1": false, "1270.0.0.1": false,
	} {
		if got := OwnHost(host); got != want {
			t.Errorf("OwnHost(%q) = %v", host, got)
		}
	}
}
