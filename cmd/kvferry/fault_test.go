package main

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
)

// trio is a prefill engine, a decode engine and a router as processes of their own, with a relay
// between the prefill engine and the decode engine's agent.
type trio struct {
	prefill, decode, router *process
	relay                   *relay
	freeP, freeD            float64
}

// newTrio starts one; budget is how many bytes the relay lets through to the decode engine's agent.
// The lease is short, so that blocks that only a lease brings home come home within the test.
func newTrio(t *testing.T, budget int64, prefillArgs ...string) *trio {
	t.Helper()
	r := testRelay(t)
	if budget >= 0 {
		r.holdAfter(budget)
	}
	agent := freePort(t)
	x := &trio{relay: r}
	x.prefill = serverUp(t, append([]string{"engine", "--role", "prefill", "--listen", "127.0.0.1:0", "--lease", "2s"}, prefillArgs...)...)
	x.decode = serverUp(t, "engine", "--role", "decode", "--listen", "127.0.0.1:0", "--lease", "2s",
		"--agent-listen", agent, "--agent-advertise", r.addr)
	r.run(agent)
	x.router = serverUp(t, "router", "--listen", "127.0.0.1:0", "--prefill", x.prefill.ready["url"], "--decode", x.decode.ready["url"])
	x.freeP, x.freeD = x.prefill.free(), x.decode.free()
	return x
}

// ask sends a prompt through the router, in the background.
func (x *trio) ask(prompt string, maxTokens int) <-chan answer {
	done := make(chan answer, 1)
	body := fmt.Sprintf(`{"model":"kvferry-tiny","prompt":%q,"max_tokens":%d,"temperature":0}`, prompt, maxTokens)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		done <- post(ctx, x.router.ready["url"]+"/v1/completions", body)
	}()
	return done
}

// home waits until the blocks of the engines that live are all free again.
func (x *trio) home(t *testing.T, prefill, decode bool) {
	t.Helper()
	if prefill {
		eventually(t, "the prefill engine's blocks come home", func() bool { return x.prefill.free() == x.freeP })
	}
	if decode {
		eventually(t, "the decode engine's blocks come home", func() bool { return x.decode.free() == x.freeD })
	}
}

// works checks that the trio serves a request, whatever happened before.
func (x *trio) works(t *testing.T) {
	t.Helper()
	if a := <-x.ask(text(77, 50), 4); a.status != 200 {
		t.Errorf("the next request: status %d %s %v", a.status, a.body, a.err)
	}
}

// failed checks that an answer is an error with a message that names what it must.
func failed(t *testing.T, a answer, want ...string) {
	t.Helper()
	if a.err != nil || a.status < 400 {
		t.Fatalf("status %d %q, error %v; want an error answer", a.status, a.body, a.err)
	}
	for _, w := range want {
		if !strings.Contains(a.message(), w) {
			t.Errorf("the message lacks %q: %s", w, a.body)
		}
	}
}

func running(p *process, metric string) func() bool {
	return func() bool {
		v, err := gauge(context.Background(), p.ready["url"], metric)
		return err == nil && v > 0
	}
}

// slow is a prompt whose prefill takes long enough to be met in the middle.
func slow() string { return text(60, 2040) }

func TestPrefillKilledDuringPrefill(t *testing.T) {
	x := newTrio(t, -1, "--max-batch-tokens", "32", "--threads", "1")
	done := x.ask(slow(), 8)
	eventually(t, "the prefill runs", running(x.prefill, "kvferry_engine_requests_running"))
	eventually(t, "the decode engine waits", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
	x.prefill.kill()
	failed(t, <-done, "prefill")
	x.home(t, false, true)
}

func TestPrefillKilledDuringTheWrite(t *testing.T) {
	x := newTrio(t, 200_000)
	done := x.ask(slow(), 8)
	waitHeld(t, x.relay)
	x.prefill.kill()
	failed(t, <-done)
	x.home(t, false, true)
}

func TestPrefillKilledBeforeTheWrite(t *testing.T) {
	x := newTrio(t, 0) // nothing reaches the decode engine's agent, so no write begins
	done := x.ask(text(61, 200), 8)
	waitHeld(t, x.relay)
	x.prefill.kill()
	failed(t, <-done)
	x.home(t, false, true)
}

func TestWriteCutInTheMiddle(t *testing.T) {
	x := newTrio(t, 200_000)
	done := x.ask(slow(), 8)
	waitHeld(t, x.relay)
	x.relay.cut(true)
	failed(t, <-done)
	x.home(t, true, true)
}

func TestDecodeKilledWhileWaiting(t *testing.T) {
	x := newTrio(t, -1, "--max-batch-tokens", "32", "--threads", "1")
	done := x.ask(slow(), 8)
	eventually(t, "the decode engine waits", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
	x.decode.kill()
	failed(t, <-done, "decode")
	x.home(t, true, false)
}

func TestDecodeKilledDuringTheWrite(t *testing.T) {
	x := newTrio(t, 200_000)
	done := x.ask(slow(), 8)
	waitHeld(t, x.relay)
	x.decode.kill()
	failed(t, <-done, "decode")
	x.relay.cut(true)
	x.home(t, true, false)
}

func TestRouterKilled(t *testing.T) {
	x := newTrio(t, -1, "--max-batch-tokens", "32", "--threads", "1")
	done := x.ask(slow(), 8)
	eventually(t, "the decode engine waits", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
	x.router.kill()
	if a := <-done; a.err == nil && a.status < 400 {
		t.Errorf("status %d from a router that was killed", a.status)
	}
	x.home(t, true, true)
	x.router = serverUp(t, "router", "--listen", "127.0.0.1:0", "--prefill", x.prefill.ready["url"], "--decode", x.decode.ready["url"])
	x.works(t)
	x.home(t, true, true)
}

func TestClientGoesAway(t *testing.T) {
	x := newTrio(t, -1, "--max-batch-tokens", "32", "--threads", "1")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan answer, 1)
	go func() {
		done <- post(ctx, x.router.ready["url"]+"/v1/completions", fmt.Sprintf(`{"model":"kvferry-tiny","prompt":%q,"max_tokens":8}`, slow()))
	}()
	eventually(t, "the decode engine waits", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
	cancel()
	<-done
	x.home(t, true, true)
	x.works(t)
}

func TestTermDrains(t *testing.T) {
	x := newTrio(t, -1)
	done := x.ask(text(62, 300), 64)
	eventually(t, "the request is there", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
	for _, p := range []*process{x.router, x.decode, x.prefill} {
		p.signal(syscall.SIGTERM)
		if code := p.wait(); code != 0 {
			t.Errorf("%s: exit status %d:\n%s", p.name, code, p.output())
		}
	}
	if a := <-done; a.status != 200 {
		t.Errorf("a request in flight at SIGTERM: status %d %s %v", a.status, a.body, a.err)
	}
}
