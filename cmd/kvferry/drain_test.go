package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
)

// An engine that is told to stop while it holds blocks for a peer says so to everybody that asks, hands
// the blocks over, and ends then, well before its bound.
func TestTermHandsOver(t *testing.T) {
	t.Parallel()
	// No bound is near: whatever ends has ended by itself.
	const far = "10m"
	p := serverUp(t, "engine", "--role", "prefill", "--listen", "127.0.0.1:0", "--drain", far, "--lease", far)
	d := serverUp(t, "engine", "--role", "decode", "--listen", "127.0.0.1:0", "--drain", far)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	prompt := text(70, 100)
	ask := func(to *process, maxTokens int, params string) answer {
		body := fmt.Sprintf(`{"prompt":%q,"max_tokens":%d,"temperature":0%s}`, prompt, maxTokens, params)
		return post(ctx, to.ready["url"]+"/v1/completions", body, "X-Request-Id", "R")
	}
	if a := ask(p, 1, `,"kv_transfer_params":{"do_remote_decode":true,"transfer_id":"x"}`); a.status != 200 {
		t.Fatalf("%d %s %v", a.status, a.body, a.err)
	}
	p.signal(syscall.SIGTERM)
	eventually(t, "the engine refuses requests", func() bool { return ask(p, 1, "").status == http.StatusServiceUnavailable })
	if a := ask(p, 1, ""); !strings.Contains(a.message(), "shutting down") {
		t.Errorf("%d %s", a.status, a.body)
	}
	side := strings.Split(p.ready["side_channel"], ":")
	a := ask(d, 4, fmt.Sprintf(`,"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":%q,"remote_host":%q,"remote_port":%s,"tp_size":1,"remote_request_id":"R","transfer_id":"x"}`,
		p.ready["engine_id"], side[0], side[1]))
	alone := ask(d, 4, `,"cache_salt":"another"`) // so that it is computed by D alone
	if a.status != 200 || tokensOf(a) != tokensOf(alone) {
		t.Errorf("D answers %d %s, alone %s", a.status, a.body, alone.body)
	}
	if code := p.wait(); code != 0 {
		t.Errorf("exit status %d:\n%s", code, p.output())
	}
	d.signal(syscall.SIGTERM)
	if code := d.wait(); code != 0 {
		t.Errorf("exit status %d:\n%s", code, d.output())
	}
}

// tokensOf is the part of an answer's body that tells its text.
func tokensOf(a answer) string {
	_, rest, _ := strings.Cut(a.body, `"text":`)
	text, _, _ := strings.Cut(rest, `,"logprobs"`)
	return text
}

// Signals that come with the first one are the same wish; a later one ends an engine at once, however long
// its drain.
func TestSecondSignalEnds(t *testing.T) {
	t.Parallel()
	p := serverUp(t, "engine", "--listen", "127.0.0.1:0", "--drain", "30m")
	ctx, cancel := context.WithCancel(context.Background())
	busy := make(chan answer, 1)
	go func() { // a request that lives longer than the test
		busy <- post(ctx, p.ready["url"]+"/v1/completions", `{"prompt":"x","n":64,"max_tokens":2000,"ignore_eos":true}`)
	}()
	t.Cleanup(func() { cancel(); <-busy })
	eventually(t, "the engine works", admitted(p, 64))
	p.signal(syscall.SIGTERM)
	p.signal(syscall.SIGTERM)
	p.waitLine(func(l string) bool { return strings.Contains(l, "stopping; a second signal ends it at once") })
	if resp, err := http.Get(p.ready["url"] + "/health"); err != nil {
		t.Errorf("the second of two signals at a time ended it: %v", err)
	} else {
		_ = resp.Body.Close()
	}
	eventually(t, "the engine ends", func() bool {
		p.signal(syscall.SIGINT)
		select {
		case <-p.done:
			return true
		default:
			return false
		}
	})
	if s := p.cmd.ProcessState.Sys().(syscall.WaitStatus); s.Signal() != syscall.SIGINT {
		t.Errorf("it ended by %v:\n%s", s, p.output())
	}
}
