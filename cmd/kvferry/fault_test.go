package main

import (
	"context"
	"syscall"
	"testing"
)

// slowly are the flags of a prefill engine whose prefills can be met in the middle.
var slowly = []string{"--max-batch-tokens", "32", "--threads", "1"}

// slow is a prompt whose prefill takes long.
func slow() string { return text(60, 2040) }

// phase is a moment in the life of a hand-off. meet sends a request and returns when it is there.
type phase struct {
	name  string
	flags []string // of the prefill engine
	meet  func(t *testing.T, x *trio) <-chan answer
}

// phases are the moments at which a fault can find a hand-off. The engines know each other already,
// so that what is held back is the registration or the write, not a handshake.
var phases = []phase{
	{"before the registration arrives", nil, func(t *testing.T, x *trio) <-chan answer {
		x.works(t)
		x.home(t, true, true)
		x.toPrefill.hold()
		done := x.ask(text(61, 200), 8)
		eventually(t, "the prefill engine holds blocks that nobody asks for", running(x.prefill, "kvferry_engine_requests_held"))
		eventually(t, "the decode engine waits", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
		return done
	}},
	{"during the prefill", slowly, func(t *testing.T, x *trio) <-chan answer {
		x.works(t)
		x.home(t, true, true)
		done := x.ask(slow(), 8)
		eventually(t, "the prefill runs", running(x.prefill, "kvferry_engine_requests_running"))
		eventually(t, "the decode engine waits", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
		return done
	}},
	{"before the write", nil, func(t *testing.T, x *trio) <-chan answer {
		x.works(t)
		x.home(t, true, true)
		x.toDecode.holdAfter(0)
		done := x.ask(text(61, 200), 8)
		waitHeld(t, x.toDecode)
		return done
	}},
	{"during the write", nil, func(t *testing.T, x *trio) <-chan answer {
		x.works(t)
		x.home(t, true, true)
		x.toDecode.holdAfter(200_000)
		done := x.ask(text(61, 700), 8) // 1.8 MB of KV
		waitHeld(t, x.toDecode)
		return done
	}},
}

// atEachPhase runs a test at every phase, each with a trio of its own.
func atEachPhase(t *testing.T, test func(t *testing.T, x *trio, done <-chan answer)) {
	t.Helper()
	for _, p := range phases {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			x := newTrio(t, p.flags...)
			test(t, x, p.meet(t, x))
		})
	}
}

// letGo lets the connections carry bytes again.
func (x *trio) letGo() {
	x.toPrefill.release()
	x.toDecode.release()
}

func TestPrefillKilled(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, done <-chan answer) {
		x.prefill.kill()
		failed(t, <-done)
		x.home(t, false, true)
		x.letGo()
		x.prefill = again(t, x.prefill, x.prefillArgs)
		x.works(t)
		x.home(t, true, true)
	})
}

func TestDecodeKilled(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, done <-chan answer) {
		x.decode.kill()
		x.letGo() // a dead process's connections are reset
		failed(t, <-done, "decode")
		x.home(t, true, false)
		x.decode = again(t, x.decode, x.decodeArgs)
		x.works(t)
		x.home(t, true, true)
	})
}

func TestRouterKilled(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, done <-chan answer) {
		x.router.kill()
		if a := <-done; a.err == nil && a.status < 400 {
			t.Errorf("status %d from a router that was killed", a.status)
		}
		x.home(t, false, true)
		x.letGo()
		x.home(t, true, true)
		x.router = again(t, x.router, x.routerArgs)
		x.works(t)
		x.home(t, true, true)
	})
}

// A prefill engine that stands still says nothing, but its connections stay.
func TestPrefillStopped(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, done <-chan answer) {
		x.prefill.signal(syscall.SIGSTOP)
		failed(t, <-done, "nothing was heard of its prefill engine")
		x.home(t, false, true)
		x.prefill.signal(syscall.SIGCONT)
		x.letGo()
		x.home(t, true, true)
		x.works(t)
		x.home(t, true, true)
	})
}

// A network that carries nothing is no different from a peer that stands still.
func TestConnectionsHeld(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, done <-chan answer) {
		x.toPrefill.hold()
		x.toDecode.hold()
		failed(t, <-done, "prefill engine")
		x.home(t, false, true)
		x.letGo()
		x.home(t, true, true)
		x.works(t)
		x.home(t, true, true)
	})
}

// While a decode engine stands still its request waits; the prefill engine does not wait for it
// unless it has begun to write.
func TestDecodeStopped(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, done <-chan answer) {
		x.decode.signal(syscall.SIGSTOP)
		select {
		case <-x.toDecode.held:
		default:
			x.home(t, true, false)
		}
		x.decode.signal(syscall.SIGCONT)
		x.letGo()
		if a := <-done; a.err != nil || a.status != 200 && a.message() == "" {
			t.Errorf("status %d %q, error %v", a.status, a.body, a.err)
		}
		x.home(t, true, true)
		x.works(t)
		x.home(t, true, true)
	})
}

func TestConnectionsCut(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, done <-chan answer) {
		x.toPrefill.cut(false)
		x.toDecode.cut(false)
		x.letGo()
		if a := <-done; a.err != nil || a.status != 200 && a.message() == "" {
			t.Errorf("status %d %q, error %v", a.status, a.body, a.err)
		}
		x.home(t, true, true)
		x.works(t)
		x.home(t, true, true)
	})
}

func TestClientGoesAway(t *testing.T) {
	for _, p := range phases {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			x := newTrio(t, p.flags...)
			ctx, cancel := context.WithCancel(context.Background())
			x.client = ctx
			done := p.meet(t, x)
			x.client = nil
			cancel()
			<-done
			x.home(t, false, true)
			x.letGo()
			x.home(t, true, true)
			x.works(t)
			x.home(t, true, true)
		})
	}
}

// A prefill engine that cannot be asked where it is, or a decode engine that cannot be greeted, costs
// the request an error and nothing afterwards.
func TestSideChannelCut(t *testing.T) {
	for i, want := range []string{"handshake", "prefill engine"} {
		t.Run([]string{"prefill", "decode"}[i], func(t *testing.T) {
			t.Parallel()
			x := newTrio(t)
			x.sides[i].cut(true)
			failed(t, <-x.ask(text(63, 100), 8), want)
			x.home(t, true, true)
			x.sides[i].accept()
			x.works(t)
			x.home(t, true, true)
		})
	}
}

// Engines whose ids are given come back as others all the same: what was prepared for them before is
// not used.
func TestRestartUnderTheSameID(t *testing.T) {
	t.Parallel()
	x := newTrio(t, "--engine-id", "the-one-p")
	x.decode.kill()
	x.decodeArgs = append(x.decodeArgs, "--engine-id", "the-one-d")
	x.decode = again(t, x.decode, x.decodeArgs)
	want := x.tokens(t)
	for range 2 {
		x.prefill.kill()
		x.prefill = again(t, x.prefill, x.prefillArgs)
		x.same(t, "after a restart of P", want)
		x.decode.kill()
		x.decode = again(t, x.decode, x.decodeArgs)
		x.same(t, "after a restart of D", want)
	}
	x.home(t, true, true)
}

// A prefill engine at work is slow, not dead: many times the silence after which it would be given
// up passes before it has computed the prompt, and before it begins with the next one.
func TestSlowPrefillIsNotDead(t *testing.T) {
	t.Parallel()
	x := newTrio(t, "--threads", "1", "--max-batch-tokens", "8", "--max-running", "1")
	var all []<-chan answer
	for seed := range 3 {
		all = append(all, x.ask(text(64+seed, 2000), 2))
	}
	for _, done := range all {
		if a := <-done; a.status != 200 {
			t.Errorf("status %d %s %v", a.status, a.body, a.err)
		}
	}
	x.home(t, true, true)
}

func TestTermDrains(t *testing.T) {
	t.Parallel()
	x := newTrio(t)
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
