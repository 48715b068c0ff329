package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

// trio is a prefill engine, a decode engine and a router as processes of their own. Each engine's
// agent and side channel are reached through a relay. The lease is short, so that blocks that only a
// lease brings home come home within the test, and the heartbeat interval is a sixth of it.
type trio struct {
	mode                    kv.TransferMode
	prefill, decode, router *process
	toPrefill, toDecode     *relay // to the agents: registrations and heartbeats; writes
	sides                   [2]*relay
	freeP, freeD            float64

	prefillArgs, decodeArgs, routerArgs []string

	client context.Context // of the requests; nil: they stay
}

var lastHost atomic.Int32

// hosts are two loopback addresses that no other trio and no other program uses, so that their ports
// stay free while an engine is down: one for the ports that are chosen here, one for those that a
// server chooses itself.
func hosts() (ours, theirs string) {
	pid, n := os.Getpid(), lastHost.Add(1)&255
	return fmt.Sprintf("127.%d.%d.%d", 128+pid/250%64, n, 1+pid%250), fmt.Sprintf("127.%d.%d.%d", 192+pid/250%63, n, 1+pid%250)
}

func newTrio(t *testing.T, mode kv.TransferMode, prefillArgs ...string) *trio {
	t.Helper()
	ours, theirs := hosts()
	relayed := func(role string) (agent, side *relay, args []string) {
		agent, side = testRelay(t), testRelay(t)
		behind := func(r *relay) string {
			at := ours + ":" + strconv.Itoa(r.port())
			r.run(at)
			return at
		}
		return agent, side, []string{"engine", "--role", role, "--listen", theirs + ":0", "--lease", "2s", "--transfer-silence", "5s", "--transport", "tcp", "--mode", string(mode),
			"--agent-listen", behind(agent), "--agent-advertise", agent.addr,
			"--side-channel", behind(side), "--advertise-host", "127.0.0.1"}
	}
	x := &trio{mode: mode}
	x.toPrefill, x.sides[0], x.prefillArgs = relayed("prefill")
	x.toDecode, x.sides[1], x.decodeArgs = relayed("decode")
	x.prefillArgs = append(x.prefillArgs, prefillArgs...)
	x.prefill, x.decode = serverUp(t, x.prefillArgs...), serverUp(t, x.decodeArgs...)
	x.routerArgs = []string{"router", "--listen", theirs + ":0", "--prefill", x.prefill.ready["url"], "--decode", x.decode.ready["url"]}
	x.router = serverUp(t, x.routerArgs...)
	x.freeP, x.freeD = x.prefill.free(), x.decode.free()
	return x
}

// again starts a server that was killed, at its old addresses.
func again(t *testing.T, p *process, args []string) *process {
	t.Helper()
	return serverUp(t, append(args, "--listen", strings.TrimPrefix(p.ready["url"], "http://"))...)
}

// ask sends a prompt through the router, in the background.
func (x *trio) ask(prompt string, maxTokens int) <-chan answer {
	done := make(chan answer, 1)
	body := fmt.Sprintf(`{"model":"kvferry-tiny","prompt":%q,"max_tokens":%d,"temperature":0}`, prompt, maxTokens)
	client := x.client
	if client == nil {
		client = context.Background()
	}
	go func() {
		ctx, cancel := context.WithTimeout(client, patience)
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

// admitted reports whether an engine has taken n requests that have not ended: the answers of one are taken one after
// the other, and an engine that is to stop takes no more.
func admitted(p *process, n float64) func() bool {
	return func() bool {
		running, err1 := gauge(context.Background(), p.ready["url"], "kvferry_engine_requests_running")
		waiting, err2 := gauge(context.Background(), p.ready["url"], "kvferry_engine_requests_waiting")
		return err1 == nil && err2 == nil && running+waiting >= n
	}
}

// tokens asks for an answer that is always the same.
func (x *trio) tokens(t *testing.T) []int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	got, err := complete(ctx, x.router.ready["url"], completionRequest{Model: "kvferry-tiny", Prompt: text(70, 120), MaxTokens: 8, ReturnTokenIDs: true, IgnoreEOS: true})
	if err != nil {
		t.Fatalf("an honest request: %v", err)
	}
	return got.Tokens
}

// same checks that the answer of tokens is what it was.
func (x *trio) same(t *testing.T, when string, want []int) {
	t.Helper()
	if got := x.tokens(t); !slices.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", when, got, want)
	}
}
