package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvferry/kvferry/proxy"
	"github.com/kvferry/kvferry/proxy/core"
)

func TestParseTarget(t *testing.T) {
	for _, c := range []struct {
		flag, in string
		want     proxy.Target
		err      string
	}{
		{"prefill", "h:1", proxy.Target{URL: "h:1"}, ""},
		{"prefill", "http://h:1,engine-id=e,side-channel=[::1]:5600", proxy.Target{URL: "http://h:1", Peer: &core.Peer{EngineID: "e", Host: "::1", Port: 5600, TPSize: 1, PPSize: 1}}, ""},
		{"prefill", "h:1,engine-id=e,side-channel=h:5600,tp=4,pp=2,mode=push", proxy.Target{URL: "h:1", Peer: &core.Peer{EngineID: "e", Host: "h", Port: 5600, TPSize: 4, PPSize: 2, Mode: "push"}}, ""},
		{"prefill", "h:1,mode=pull", proxy.Target{URL: "h:1", Peer: &core.Peer{TPSize: 1, PPSize: 1, Mode: "pull"}}, ""},
		{"decode", "h:1,mode=pull", proxy.Target{URL: "h:1", Peer: &core.Peer{TPSize: 1, PPSize: 1, Mode: "pull"}}, ""},
		{"prefill", "h:1,", proxy.Target{}, `"" is no KEY=VALUE`},
		{"prefill", "h:1,tp=", proxy.Target{}, `"tp=" is no KEY=VALUE`},
		{"prefill", "h:1,engine_id=e", proxy.Target{}, `"engine_id" is unknown, use engine-id, side-channel, tp, pp, mode`},
		{"prefill", "h:1,tp=1,tp=2", proxy.Target{}, "tp is given twice"},
		{"prefill", "h:1,tp=x", proxy.Target{}, "tp=x:"},
		{"prefill", "h:1,side-channel=h", proxy.Target{}, "missing port"},
		{"prefill", "h:1,mode=write", proxy.Target{}, "use push or pull"},
		{"prefill", "h:1,mode=push,engine-id=e", proxy.Target{}, "needs engine-id= and side-channel="},
		{"decode", "h:1,tp=2", proxy.Target{}, "only mode= is needed"},
	} {
		got, err := parseTarget(c.flag, c.in)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), c.in) {
				t.Errorf("%s: %v, want %q", c.in, err, c.err)
			}
			continue
		}
		if d := cmp.Diff(c.want, got); err != nil || d != "" {
			t.Errorf("%s: %v %s", c.in, err, d)
		}
	}
}
