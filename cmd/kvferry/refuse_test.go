package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// A decode engine that refuses, or is not there, after the prefill engine has done its part: the blocks come
// home at once, with a lease that is far longer than the test, and the prefill engine goes on to serve.
func TestDecodeRefuses(t *testing.T) {
	const far = "30m"
	for _, mode := range []string{"push", "pull"} {
		for how, refuse := range map[string]func(t *testing.T, d *process){
			"it drains": func(t *testing.T, d *process) {
				ctx, cancel := context.WithCancel(context.Background())
				busy := make(chan answer, 1)
				go func() { // a request that lives longer than the test
					busy <- post(ctx, d.ready["url"]+"/v1/completions", `{"prompt":"x","n":64,"max_tokens":2000,"ignore_eos":true}`)
				}()
				t.Cleanup(func() { cancel(); <-busy })
				eventually(t, "the decode engine works", admitted(d, 64))
				d.signal(syscall.SIGTERM)
				eventually(t, "it refuses", func() bool {
					resp, err := http.Get(d.ready["url"] + "/ready")
					if err != nil {
						t.Fatal(err)
					}
					_ = resp.Body.Close()
					return resp.StatusCode == http.StatusServiceUnavailable
				})
			},
			"it is dead": func(_ *testing.T, d *process) { d.kill() },
		} {
			t.Run(mode+", "+how, func(t *testing.T) {
				t.Parallel()
				p := serverUp(t, "engine", "--role", "prefill", "--listen", "127.0.0.1:0", "--mode", mode, "--lease", far)
				d := serverUp(t, "engine", "--role", "decode", "--listen", "127.0.0.1:0", "--mode", mode, "--drain", far)
				x := &trio{prefill: p, decode: d, freeP: p.free(), freeD: d.free()}
				x.router = serverUp(t, "router", "--listen", "127.0.0.1:0", "--prefill", p.ready["url"], "--decode", d.ready["url"])
				x.works(t)
				x.home(t, true, true)
				refuse(t, d)
				for seed := range 3 {
					a := <-x.ask(text(80+seed, 300), 4)
					failed(t, a)
					if a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, `"leg":"decode"`) {
						t.Errorf("status %d %s", a.status, a.body)
					}
					x.home(t, true, false)
				}
				if mode == "pull" { // in push it may be told before it has computed all
					left := released(t, p)
					told := gaugeOf(t, x.router, `kvferry_router_releases_total{result="released"}`)
					if left != 3 || told != 3 {
						t.Errorf("%v holds of 3 were let go, the router counts %v", left, told)
					}
				}
				if v := gaugeOf(t, p, "kvferry_engine_requests_held"); v != 0 {
					t.Errorf("%v requests are held", v)
				}
			})
		}
	}
}

var releasedLeases = regexp.MustCompile(`kvferry_connector_leases_ended_total\{[^}]*reason="released"[^}]*\} (\d+)`)

// released is how many holds of an engine were let go.
func released(t *testing.T, p *process) float64 {
	t.Helper()
	resp, err := http.Get(p.ready["url"] + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		t.Fatal(err)
	}
	m := releasedLeases.FindSubmatch(page)
	if m == nil {
		return 0
	}
	n, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func gaugeOf(t *testing.T, p *process, name string) float64 {
	t.Helper()
	v, err := gauge(context.Background(), p.ready["url"], name)
	if err != nil {
		t.Error(fmt.Errorf("%s of %s: %w", name, p.name, err))
	}
	return v
}
