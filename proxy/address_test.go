package proxy

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/proxy/core"
	"github.com/kvferry/kvferry/wire"
)

// An engine of another host that says that its side channel is on loopback is warned of, once; on this
// host it is as it should be.
func TestCoordinatesOnLoopback(t *testing.T) {
	p := newEngine(t, wire.PrefillLeg, goodPrefill) // its coordinates name 127.0.0.1
	for url, warned := range map[string]bool{p.URL: false, "http://prefill.example:80": true} {
		r := newRig(t, Config{Prefill: []Target{{URL: url}}, Decode: []Target{{URL: "127.0.0.1:1"}}})
		r.transport = &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, strings.TrimPrefix(p.URL, "http://"))
		}}
		for range 2 {
			if _, _, err := r.coordinates(t.Context(), r.pools[core.Prefill].targets[0]); err != nil {
				t.Fatal(err)
			}
		}
		want := 0
		if warned {
			want = 1
		}
		if n := strings.Count(r.logs.String(), "--advertise-host HOST"); n != want {
			t.Errorf("%s: warned %d times: %s", url, n, r.logs)
		}
	}
}

// A router that reaches its engines by IPv6, with and without a scheme, tells D hosts without brackets.
func TestIPv6Engines(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"engine_id":"e","host":"","port":5600,"tp_size":1}`))
	}))
	_ = s.Listener.Close()
	s.Listener = l
	s.Start()
	defer s.Close()
	for _, url := range []string{s.URL, strings.TrimPrefix(s.URL, "http://")} {
		r := newRig(t, Config{Prefill: []Target{{URL: url}}, Decode: []Target{{URL: url}}})
		c, _, err := r.coordinates(t.Context(), r.pools[core.Prefill].targets[0])
		if err != nil || c.Host != "::1" {
			t.Errorf("%s: %+v, %v", url, c, err)
		}
	}
	if c, err := (core.Peer{EngineID: "e", Host: "[fd00::5]", Port: 1, TPSize: 1}).Check("h"); err != nil || c.Host != "fd00::5" {
		t.Errorf("%+v, %v", c, err)
	}
}
