package main

import (
	"context"
	"slices"
	"syscall"
	"testing"

	"github.com/kvferry/kvferry/kv"
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

// modes are both ways to move KV.
var modes = []kv.TransferMode{kv.Push, kv.Pull}

// phases are the moments at which a fault can find a hand-off, by mode. The engines know each other already,
// so that what is held back is the registration, the claim or the transfer, not a handshake.
var phases = map[kv.TransferMode][]phase{kv.Push: pushPhases, kv.Pull: pullPhases}

var pullPhases = []phase{
	{duringPrefill, slowly, func(t *testing.T, x *trio) <-chan answer {
		x.works(t)
		x.home(t, true, true)
		done := x.ask(slow(), 8)
		eventually(t, "the prefill runs", running(x.prefill, "kvferry_engine_requests_running"))
		return done
	}},
	{"before the claim arrives", nil, func(t *testing.T, x *trio) <-chan answer {
		x.works(t)
		x.home(t, true, true)
		x.toPrefill.hold()
		done := x.ask(text(61, 200), 8)
		eventually(t, "the prefill engine holds blocks that nobody asks for", running(x.prefill, "kvferry_engine_requests_held"))
		eventually(t, "the decode engine waits", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
		return done
	}},
	{"before the permission arrives", nil, func(t *testing.T, x *trio) <-chan answer {
		x.works(t)
		x.home(t, true, true)
		x.toDecode.holdAfter(0)
		done := x.ask(text(61, 200), 8)
		waitHeld(t, x.toDecode)
		return done
	}},
	{duringRead, nil, func(t *testing.T, x *trio) <-chan answer {
		x.works(t)
		x.home(t, true, true)
		x.toPrefill.holdAnswersAfter(200_000)
		done := x.ask(text(61, 700), 8) // 1.8 MB of KV
		waitHeld(t, x.toPrefill)
		return done
	}},
}

const (
	duringPrefill = "during the prefill"
	duringRead    = "during the read"
)

var pushPhases = []phase{
	{"before the registration arrives", nil, func(t *testing.T, x *trio) <-chan answer {
		x.works(t)
		x.home(t, true, true)
		x.toPrefill.hold()
		done := x.ask(text(61, 200), 8)
		eventually(t, "the prefill engine holds blocks that nobody asks for", running(x.prefill, "kvferry_engine_requests_held"))
		eventually(t, "the decode engine waits", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
		return done
	}},
	{duringPrefill, slowly, func(t *testing.T, x *trio) <-chan answer {
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

// atEachPhase runs a test at every phase of both modes, each with a trio of its own.
func atEachPhase(t *testing.T, test func(t *testing.T, x *trio, p phase, done <-chan answer)) {
	t.Helper()
	for _, mode := range modes {
		for _, p := range phases[mode] {
			t.Run(string(mode)+"/"+p.name, func(t *testing.T) {
				t.Parallel()
				x := newTrio(t, mode, p.flags...)
				test(t, x, p, p.meet(t, x))
			})
		}
	}
}

// inBothModes runs a test with a trio of each mode.
func inBothModes(t *testing.T, flags []string, test func(t *testing.T, x *trio)) {
	t.Helper()
	for _, mode := range modes {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			test(t, newTrio(t, mode, flags...))
		})
	}
}

// letGo lets the connections carry bytes again.
func (x *trio) letGo() {
	x.toPrefill.release()
	x.toDecode.release()
}

func TestPrefillKilled(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, p phase, done <-chan answer) {
		x.prefill.kill()
		if p.name == duringRead {
			x.letGo() // a dead process's connections are reset
		}
		failed(t, <-done)
		x.home(t, false, true)
		x.letGo()
		x.prefill = again(t, x.prefill, x.prefillArgs)
		x.works(t)
		x.home(t, true, true)
	})
}

func TestDecodeKilled(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, p phase, done <-chan answer) {
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
	atEachPhase(t, func(t *testing.T, x *trio, p phase, done <-chan answer) {
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
	atEachPhase(t, func(t *testing.T, x *trio, p phase, done <-chan answer) {
		if x.mode == kv.Pull && p.name == duringPrefill { // D does not know of the request yet
			notTold(t, x, done)
			return
		}
		x.prefill.signal(syscall.SIGSTOP)
		if x.mode == kv.Push {
			failed(t, <-done, "nothing was heard of its prefill engine")
		} else {
			failed(t, <-done)
		}
		x.home(t, false, true)
		x.prefill.signal(syscall.SIGCONT)
		x.letGo()
		x.home(t, true, true)
		x.works(t)
		x.home(t, true, true)
	})
}

// notTold is a prefill engine that stops before a decode engine knows of the request, which pull has only: the
// router's patience ends it.
func notTold(t *testing.T, x *trio, done <-chan answer) {
	x.prefill.signal(syscall.SIGSTOP)
	x.router.kill()
	<-done
	x.router = again(t, x.router, append(x.routerArgs, "--first-byte-timeout", "2s"))
	failed(t, <-x.ask(text(61, 200), 8), "has not begun to answer")
	x.home(t, false, true)
	x.prefill.signal(syscall.SIGCONT)
	x.router.kill()
	x.router = again(t, x.router, x.routerArgs)
	x.home(t, true, true)
	x.works(t)
	x.home(t, true, true)
}

// A network that carries nothing is no different from a peer that stands still.
func TestConnectionsHeld(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, p phase, done <-chan answer) {
		x.toPrefill.hold()
		x.toDecode.hold()
		if x.mode == kv.Push {
			failed(t, <-done, "prefill engine")
		} else {
			failed(t, <-done, "engine")
		}
		x.home(t, false, true)
		x.letGo()
		x.home(t, true, true)
		x.works(t)
		x.home(t, true, true)
	})
}

// While a decode engine stands still its request waits; the prefill engine does not wait for it
// unless it has begun to write. What it has permitted to read it takes back.
func TestDecodeStopped(t *testing.T) {
	atEachPhase(t, func(t *testing.T, x *trio, p phase, done <-chan answer) {
		x.decode.signal(syscall.SIGSTOP)
		select {
		case <-x.toDecode.held:
			if x.mode == kv.Pull {
				x.home(t, true, false)
			}
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
	atEachPhase(t, func(t *testing.T, x *trio, p phase, done <-chan answer) {
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

// One bit of the KV changes on the way: the transfer fails and with it the request, and the same prompt has the
// right tokens when it comes again.
func TestBytesChangeOnTheWay(t *testing.T) {
	inBothModes(t, nil, func(t *testing.T, x *trio) {
		x.works(t)
		x.home(t, true, true)
		r, back := x.toDecode, false // P writes
		if x.mode == kv.Pull {
			r, back = x.toPrefill, true // D reads
		}
		prompt := text(61, 700) // 1.8 MB of KV
		r.spoil(200_000, back)
		a := <-x.ask(prompt, 8)
		if !r.spoiled(back) {
			t.Fatal("too few bytes have come by; the test proves nothing")
		}
		failed(t, a, "checksum")
		x.home(t, true, true)
		if got, want := answerOf(t, x.router, prompt), answerOf(t, x.prefill, prompt); !slices.Equal(got, want) {
			t.Errorf("after a failed transfer: %v, want %v", got, want)
		}
		x.home(t, true, true)
	})
}

// answerOf is what a server answers to a prompt.
func answerOf(t *testing.T, p *process, prompt string) []int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	got, err := complete(ctx, p.ready["url"], completionRequest{Model: "kvferry-tiny", Prompt: prompt, MaxTokens: 8, ReturnTokenIDs: true, IgnoreEOS: true})
	if err != nil {
		t.Fatalf("%s: %v", p.name, err)
	}
	return got.Tokens
}

func TestClientGoesAway(t *testing.T) {
	for _, mode := range modes {
		for _, p := range phases[mode] {
			t.Run(string(mode)+"/"+p.name, func(t *testing.T) {
				t.Parallel()
				x := newTrio(t, mode, p.flags...)
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
}

// A prefill engine that cannot be asked where it is, or a decode engine that cannot be greeted, costs
// the request an error and nothing afterwards.
func TestSideChannelCut(t *testing.T) {
	for i, side := range []string{"prefill", "decode"} {
		t.Run(side, func(t *testing.T) {
			inBothModes(t, nil, func(t *testing.T, x *trio) {
				want := [2]string{"handshake", "prefill engine"}[i]
				if i == 1 && x.mode == kv.Pull {
					want = "can reach" // D, which P must to permit anything
				}
				x.sides[i].cut(true)
				failed(t, <-x.ask(text(63, 100), 8), want)
				x.home(t, true, true)
				x.sides[i].accept()
				x.works(t)
				x.home(t, true, true)
			})
		})
	}
}

// Engines whose ids are given come back as others all the same: what was prepared for them before is
// not used.
func TestRestartUnderTheSameID(t *testing.T) {
	inBothModes(t, []string{"--engine-id", "the-one-p"}, func(t *testing.T, x *trio) {
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
	})
}

// A prefill engine at work is slow, not dead: many times the silence after which it would be given
// up passes before it has computed the prompt, and before it begins with the next one.
func TestSlowPrefillIsNotDead(t *testing.T) {
	inBothModes(t, []string{"--threads", "1", "--max-batch-tokens", "8", "--max-running", "1"}, func(t *testing.T, x *trio) {
		long := 2000
		if x.mode == kv.Pull { // D's part begins when it is over
			long = 400
		}
		var all []<-chan answer
		for seed := range 3 {
			all = append(all, x.ask(text(64+seed, long), 2))
		}
		for _, done := range all {
			if a := <-done; a.status != 200 {
				t.Errorf("status %d %s %v", a.status, a.body, a.err)
			}
		}
		x.home(t, true, true)
	})
}

func TestTermDrains(t *testing.T) {
	inBothModes(t, slowly, func(t *testing.T, x *trio) {
		done := x.ask(slow()[:1500], 64)
		if x.mode == kv.Push {
			eventually(t, "the request is there", running(x.decode, "kvferry_engine_requests_waiting_for_remote_kv"))
		} else {
			eventually(t, "the request is there", running(x.prefill, "kvferry_engine_requests_running"))
		}
		for _, p := range []*process{x.router, x.decode, x.prefill} {
			p.signal(syscall.SIGTERM)
			if code := p.wait(); code != 0 {
				t.Errorf("%s: exit status %d:\n%s", p.name, code, p.output())
			}
		}
		if a := <-done; a.status != 200 {
			t.Errorf("a request in flight at SIGTERM: status %d %s %v", a.status, a.body, a.err)
		}
	})
}
