package worker

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// Request-id randomisation off: both engines give the same id, and give it again.
func TestEqualIDs(t *testing.T) {
	bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
		l, m := legD, legP
		l.id, m.id = "cmpl-r1-0", "cmpl-r1-0"
		l.transfer, m.transfer = "", ""
		for round := range 3 {
			what := uint32(kvOfP + round)
			p.fill(m.blocks, 0, what)
			d.decodeLeg(p, l, 0)
			time.Sleep(time.Second)
			p.prefillLeg(m, connector.FinishLength)
			time.Sleep(time.Second)
			if o := d.outcomes(l.id); len(o) != round+1 || o[round].Kind != connector.Received {
				t.Fatalf("round %d: %+v", round, o)
			}
			if err := d.holds(l.blocks, 0, what); err != nil {
				t.Errorf("round %d: %v", round, err)
			}
		}
		p.idle()
		d.idle()
	})
}

// Two requests of one X-Request-Id at the same time, told apart by their dispatch or by their
// prompt, whatever the order.
func TestSharedRequestID(t *testing.T) {
	for _, withTransfer := range []bool{true, false} {
		for _, swap := range []bool{true, false} {
			t.Run(fmt.Sprintf("transfer id %v, swapped %v", withTransfer, swap), func(t *testing.T) {
				bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
					var ls, ms []leg
					for i := range 2 {
						l := leg{id: requestID(fmt.Sprintf("cmpl-same-0-dddddd0%d", i)), tokens: 4, digest: connector.Digest{byte(i)}, blocks: []kv.BlockID{kv.BlockID(10 + i)}}
						m := leg{id: requestID(fmt.Sprintf("cmpl-same-0-aaaaaa0%d", i)), tokens: 4, digest: connector.Digest{byte(i)}, blocks: []kv.BlockID{kv.BlockID(12 + i)}}
						if withTransfer {
							l.transfer = kv.TransferID(fmt.Sprintf("xfer-%d", i))
							m.transfer = l.transfer
						}
						p.fill(m.blocks, 0, uint32(100+i))
						ls, ms = append(ls, l), append(ms, m)
					}
					for _, l := range ls {
						d.decodeLeg(p, l, 0)
					}
					time.Sleep(time.Second)
					if swap {
						ms[0], ms[1] = ms[1], ms[0]
					}
					// Without transfer ids a prompt that differs is refused at once, so both must be there.
					for _, m := range ms {
						p.prefillLeg(m, connector.FinishLength)
					}
					for i, l := range ls {
						if o := d.outcome(l.id, time.Second); o.Kind != connector.Received {
							t.Fatalf("%s: %+v", l.id, o)
						}
						if err := d.holds(l.blocks, 0, uint32(100+i)); err != nil {
							t.Error(err)
						}
					}
				})
			})
		}
	}
}

// The legs got unlike prompts: nothing is written, D is told at once.
func TestUnlikePromptsAreRefused(t *testing.T) {
	for name, change := range map[string]func(*leg){
		"other tokens":       func(l *leg) { l.digest[0]++ },
		"one token more":     func(l *leg) { l.tokens++ },
		"a block less":       func(l *leg) { l.tokens = 8; l.blocks = l.blocks[:2] },
		"no transfer id":     func(l *leg) { l.digest[0]++; l.transfer = "" },
		"other X-Request-Id": func(l *leg) { l.tokens++; l.id = "cmpl-r2-0-dddddddd" },
	} {
		for _, first := range []string{"D", "P"} {
			t.Run(name+", "+first+" first", func(t *testing.T) {
				bubble(t, millisecond, options{}, options{}, func(t *testing.T, p, d *engine) {
					l, m := legD, legP
					change(&l)
					if l.transfer == "" {
						m.transfer = ""
					}
					if first == "P" {
						p.prefillLeg(m, connector.FinishLength)
						time.Sleep(time.Second)
					}
					d.decodeLeg(p, l, 0)
					if first == "D" {
						time.Sleep(time.Second)
						p.prefillLeg(m, connector.FinishLength)
					}
					if o := d.outcome(l.id, time.Second); o.Kind != connector.ReceiveFailed {
						t.Fatalf("D: %+v", o)
					}
					d.reuse()
					time.Sleep(time.Minute)
					d.wantCanary()
					if n := p.ranks[0].worker.Stats().TransfersPosted; n != 0 {
						t.Errorf("%d transfers", n)
					}
				})
			})
		}
	}
}

func machineConfig() Config {
	l := geometry.Layout{TP: 1, PP: 1, BlockSize: 4, Ratio: 1, Order: "LBHNC", Regions: []kv.Region{
		{Base: 4096, BlockLen: 64, Stride: 64, NumBlocks: 100, Name: "layers.0"}}}
	return Config{Engine: "P", Host: "p", Port: 5600, Layout: l}.withDefaults()
}

// Every pairing that the stock connector makes by ids is made here too: the sequences of the golden
// file, step by step, except the one in which stock pairs the wrong request.
func TestStockMatchingSequences(t *testing.T) {
	raw, err := os.ReadFile("testdata/push-matching.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Acceptance []struct {
			Name   string   `json:"name"`
			Hex    string   `json:"hex"`
			Stored []string `json:"stored_as"`
		} `json:"push_reg_acceptance"`
		Sequences []struct {
			Name  string `json:"name"`
			Steps []struct {
				Step  []json.RawMessage   `json:"step"`
				Fired [][]json.RawMessage `json:"fired"`
			} `json:"steps"`
		} `json:"matching_sequences"`
	}
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	text := func(r json.RawMessage) (s string) {
		if err := json.Unmarshal(r, &s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	for _, seq := range file.Sequences {
		t.Run(seq.Name, func(t *testing.T) {
			m := newMachine(machineConfig())
			now := time.Unix(1000, 0)
			for i, s := range seq.Steps {
				m.acts = nil
				id := text(s.Step[1])
				switch kind := text(s.Step[0]); kind {
				case "reg":
					m.Step(now, notification{agent.Notification{From: agent.PeerID{Name: "d", Gen: 1}, Msg: stockRegistration(t, id)}})
				case "finish":
					m.Step(now, stepMeta{connector.StepMeta{Finished: []connector.FinishedBlocks{{ID: kv.RequestID(id),
						Blocks: kv.BlockIDs{{4}}, NumTokens: 4, Lease: time.Minute}}}})
				case "evict":
					continue
				default:
					t.Skipf("step %q is of the stock's inner tables", kind)
				}
				var got []string
				for _, a := range m.acts {
					if e, ok := a.(emit); ok {
						if x, ok := e.Event.(event.RegistrationMatched); ok {
							got = append(got, string(x.Request)+" "+string(x.Remote))
						}
					}
				}
				var want []string
				for _, f := range s.Fired {
					want = append(want, text(f[0])+" "+text(f[len(f)-1]))
				}
				if seq.Name == "second_copy_after_match_stays" {
					// Stock files the second copy and gives it the blocks of a retry. Here the copy is
					// nothing, and the retry's own registration gets them.
					want = nil
					switch i {
					case 1:
						want = []string{"cmpl-a-0-aaaaaaaa cmpl-a-0-11111111"}
					case 5:
						want = []string{"cmpl-a-0-bbbbbbbb cmpl-a-0-22222222"}
					}
				}
				if fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("step %d (%s): fired %q, stock fires %q", i, id, got, want)
				}
			}
		})
	}
	for _, a := range file.Acceptance {
		if len(a.Stored) > 0 {
			continue // what stock stores, this may refuse: see package wire
		}
		m := newMachine(machineConfig())
		msg, err := hex.DecodeString(a.Hex)
		if err != nil {
			t.Fatal(err)
		}
		m.Step(time.Unix(1000, 0), notification{agent.Notification{From: agent.PeerID{Name: "d", Gen: 1}, Msg: msg}})
		if s := m.snapshot(); s.Waiting != 0 || s.Ignored != 1 {
			t.Errorf("%s: %d registrations wait, %d notifications ignored", a.Name, s.Waiting, s.Ignored)
		}
	}
}

func stockRegistration(t testing.TB, id string) []byte {
	t.Helper()
	msg, err := wire.AppendPushReg(nil, &wire.PushReg{RequestID: kv.RequestID(id), DecodeEngineID: "D", DecodeHost: "d", DecodePort: 5600,
		DecodeTPSize: 1, LocalBlockIDs: kv.BlockIDs{{1}}})
	if err != nil {
		t.Fatal(err)
	}
	return msg
}

// Both sides of one dispatch find each other from either side, and never across two dispatches.
func TestLookupsAndKeysAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string, digest bool) identity {
			i := identity{
				transfer: kv.TransferID(rapid.SampledFrom([]string{"", "x1", "x2"}).Draw(t, name+" transfer")),
				id: kv.RequestID(rapid.SampledFrom([]string{"a-0", "b-0"}).Draw(t, name+" base") +
					rapid.SampledFrom([]string{"", "-11111111", "-22222222"}).Draw(t, name+" suffix")),
			}
			if i.hasDigest = digest; digest {
				i.digest[0] = byte(rapid.IntRange(0, 1).Draw(t, name+" prompt"))
			}
			return i
		}
		p := draw("P", true)
		d := draw("D", rapid.Bool().Draw(t, "kvferry D"))
		best := func(looks, keys []matchKey) (matchKind, bool) {
			for _, l := range looks {
				for _, k := range keys {
					if l == k {
						return l.kind, true
					}
				}
			}
			return 0, false
		}
		fromP, okP := best(p.lookups(inRegistrations), d.keys())
		fromD, okD := best(d.lookups(inBlocks), p.keys())
		if okP != okD || fromP != fromD {
			t.Fatalf("P finds D: %v by %v, D finds P: %v by %v", okP, fromP, okD, fromD)
		}
		sameBase := p.id.Base() == d.id.Base()
		var want bool
		switch {
		case p.transfer != "" && d.transfer != "":
			want = p.transfer == d.transfer && (sameBase || !d.hasDigest || p.digest == d.digest)
		default:
			want = p.id == d.id || sameBase
		}
		if okP != want {
			t.Fatalf("pairs: %v, want %v", okP, want)
		}
	})
}

func TestReplayGuard(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w replayGuard
		seen := map[uint64]bool{}
		newest := uint64(0)
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			var g uint64
			if rapid.Bool().Draw(t, "far") {
				g = newest + uint64(rapid.IntRange(0, 3*replayWindow).Draw(t, "jump"))
			} else {
				g = max(1, newest+5-uint64(rapid.IntRange(0, int(min(newest+4, replayWindow+20))).Draw(t, "back")))
			}
			if g == 0 {
				continue
			}
			want := !seen[g] && (g > newest || newest-g < replayWindow)
			if got := w.fresh(g); got != want {
				t.Fatalf("generation %d with newest %d: fresh %v, want %v", g, newest, got, want)
			}
			seen[g] = true
			newest = max(newest, g)
		}
	})
}

// Matching costs the same however many registrations wait.
func BenchmarkMatch(b *testing.B) {
	for _, pending := range []int{0, 100, 5000} {
		b.Run(fmt.Sprintf("%d pending", pending), func(b *testing.B) { benchmarkMatch(b, pending) })
	}
}

func benchmarkMatch(b *testing.B, pending int) {
	m := newMachine(machineConfig())
	now := time.Unix(1000, 0)
	for i := range pending {
		m.Step(now, from(fmt.Sprint("d", i%2), stockRegistration(b, fmt.Sprintf("cmpl-pending%d-0-11111111", i))))
	}
	i := 0
	for b.Loop() {
		i++
		m.Step(now, from("d", stockRegistration(b, fmt.Sprintf("cmpl-x%d-0-11111111", i))))
		m.Step(now, stepMeta{connector.StepMeta{Finished: []connector.FinishedBlocks{{ID: kv.RequestID(fmt.Sprintf("cmpl-x%d-0-22222222", i)),
			Blocks: kv.BlockIDs{{4}}, NumTokens: 4, Lease: time.Minute}}}})
		m.Step(now, connectFailed{connector.PeerAddr{Engine: "D", Host: "d", Port: 5600, TP: 1, PP: 1}, agent.ErrClosed})
	}
	if s := m.snapshot(); s.Waiting != pending || s.Matched != uint64(i) {
		b.Fatalf("%+v", s)
	}
}
