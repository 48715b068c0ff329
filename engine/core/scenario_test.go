package core

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// TestScenarios runs the files in testdata/scenarios: each line of input is an event, the output is everything
// that the machine says and asks of its connector.
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		var s *scenario
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				s = newScenario(t, d)
				return ""
			}
			return s.run(t, d)
		})
	})
}

type scenario struct {
	m       *Machine
	conn    *fakeConn
	mem     *memory
	batch   []Sequence
	prompts map[string][]kv.Token
	now     time.Time
	out     strings.Builder
}

func newScenario(t *testing.T, d *datadriven.TestData) *scenario {
	cfg := Config{BlockSize: 4, NumBlocks: 8, MaxBatchTokens: 16, MaxRunning: 4, MaxWaiting: 4, MaxContext: 64,
		EOS: []kv.Token{fakeVocab}, PrefixCaching: true}
	for key, p := range map[string]*int{"block-size": &cfg.BlockSize, "blocks": &cfg.NumBlocks, "batch": &cfg.MaxBatchTokens,
		"running": &cfg.MaxRunning, "waiting": &cfg.MaxWaiting, "context": &cfg.MaxContext} {
		d.MaybeScanArgs(t, key, p)
	}
	if d.HasArg("no-cache") {
		cfg.PrefixCaching = false
	}
	if d.HasArg("recompute") {
		cfg.LoadFailure = kv.RecomputeOnLoadFailure
	}
	var tier int
	d.MaybeScanArgs(t, "tier", &tier)
	cfg.Tier, cfg.TierTimeout = tier > 0, time.Duration(tier)*time.Second
	var park int
	d.MaybeScanArgs(t, "park", &park)
	cfg.ParkTimeout = time.Duration(park) * time.Second
	s := &scenario{mem: newMemory(cfg), prompts: map[string][]kv.Token{}}
	s.conn = newFakeConn(t.Fatal)
	s.conn.both = d.HasArg("bidirectional")
	s.conn.trace = func(format string, args ...any) { fmt.Fprintf(&s.out, "  connector: "+format+"\n", args...) }
	var err error
	if s.m, err = New(cfg, s.conn); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *scenario) run(t *testing.T, d *datadriven.TestData) string {
	s.out.Reset()
	for _, line := range strings.Split(d.Input, "\n") {
		if line != "" {
			s.line(t, line)
		}
	}
	if d.Cmd == "stats" {
		st := s.m.Stats()
		fmt.Fprintf(&s.out, "free=%d/%d cached=%d running=%d waiting=%d remote=%d held=%d hits=%d/%d preemptions=%d stray=%d finished=%v",
			st.BlocksFree, st.BlocksTotal, st.BlocksCached, st.Running, st.Waiting, st.WaitingRemote, st.Held,
			st.PrefixHits, st.PrefixQueries, st.Preemptions, st.StrayOutcomes, st.Finished)
		if st.TurnsKept > 0 {
			fmt.Fprintf(&s.out, " turns=%d reclaimed=%d", st.TurnsKept, st.TurnsReclaimed)
		}
		if s.m.cfg.Tier {
			fmt.Fprintf(&s.out, " looking=%d loading=%d copies=%d asked=%d loaded=%d short=%d stored=%d timeouts=%d",
				st.Looking, st.Loading, st.Copies, st.TierQueries, st.TierTokens, st.TierShort, st.TierStored, st.TierTimeouts)
		}
		if st.ReceiveFailed > 0 {
			fmt.Fprintf(&s.out, " failed=%d recomputed=%d unparked=%d", st.ReceiveFailed, st.Recomputed, st.Unparked)
		}
		fmt.Fprintln(&s.out)
	}
	return s.out.String()
}

// line is one event: verb, id, options as key=value.
func (s *scenario) line(t *testing.T, line string) {
	fields := strings.Fields(line)
	opt := map[string]string{}
	for _, f := range fields[1:] {
		k, v, _ := strings.Cut(f, "=")
		opt[k] = v
	}
	id := kv.RequestID(opt["id"])
	fmt.Fprintf(&s.out, "> %s\n", line)
	switch fields[0] {
	case "add":
		r := Request{ID: id, Keys: Keys{Salt: opt["salt"]}}
		var from, to int
		if _, err := fmt.Sscanf(opt["prompt"], "%d-%d", &from, &to); err == nil {
			for i := from; i <= to; i++ {
				r.Prompt = append(r.Prompt, kv.Token(i))
			}
		}
		s.prompts[opt["id"]] = r.Prompt
		fmt.Sscan(opt["max"], &r.MaxTokens)
		if v, ok := opt["stop"]; ok {
			var x kv.Token
			fmt.Sscan(v, &x)
			r.StopTokens = []kv.Token{x}
		}
		switch opt["hand-off"] {
		case "prefill":
			r.Params = &kv.TransferParams{DoRemoteDecode: true}
		case "decode":
			r.Params = &kv.TransferParams{DoRemotePrefill: true, RemoteEngineID: "P"}
		case "turn":
			r.Params = &kv.TransferParams{DoRemoteDecode: true, RemoteEngineID: "D", RemoteBlockIDs: kv.BlockIDs{{0}}}
			fmt.Sscan(opt["tokens"], &r.Params.RemoteNumTokens)
		}
		r.Tier.Whole = opt["whole"] == "true"
		for key, to := range map[string]**int{"max-load": &r.Tier.MaxLoad, "max-store": &r.Tier.MaxStore} {
			if v, ok := opt[key]; ok {
				*to = new(int)
				fmt.Sscan(v, *to)
			}
		}
		if p, ok := opt["policy"]; ok {
			r.Params.LoadFailurePolicy = kv.LoadFailurePolicy(p)
		}
		s.step(t, Add{Request: r})
	case "abort":
		s.step(t, Abort{ID: id, Err: errors.New("client gone")})
	case "release":
		var lease kv.Generation
		fmt.Sscan(opt["lease"], &lease)
		s.step(t, ReleaseHold{ID: id, Lease: lease})
	case "done":
		if s.batch == nil {
			fmt.Fprintln(&s.out, "nothing is in flight")
			return
		}
		done := StepDone{}
		for _, q := range s.batch {
			res := s.mem.compute(q)
			if opt["stop"] == string(q.ID) {
				res.Stop = true
			}
			if opt["fail"] == string(q.ID) {
				res.Err = errors.New("logits are not finite")
			}
			done.Results = append(done.Results, res)
		}
		if v, ok := opt["err"]; ok {
			done = StepDone{Err: errors.New(v)}
		}
		s.batch = nil
		s.step(t, done)
	case "received":
		q := s.conn.reqs[id]
		all := entries(s.prompts[opt["id"]])[:q.computed+q.external]
		s.mem.write(q.blocks, q.computed, all[q.computed:])
		s.step(t, ConnectorOutput{connector.WorkerOutput{Recv: []connector.ReceiveReport{{ID: id}}}})
	case "failed":
		err := &connector.Error{Request: id, Peer: "P", Phase: connector.PhaseTransfer, Reason: "cut"}
		s.step(t, ConnectorOutput{connector.WorkerOutput{Recv: []connector.ReceiveReport{{ID: id, Err: err}}}})
	case "sent":
		s.step(t, ConnectorOutput{connector.WorkerOutput{Sent: []connector.SentReport{{ID: id}}}})
	case "expire":
		err := &connector.Error{Request: id, Peer: "P", Phase: connector.PhaseWait, Reason: "silence"}
		s.conn.expired = []connector.Outcome{{ID: id, Kind: connector.ReceiveFailed, Err: err}}
		s.step(t, Tick{})
	case "wait": // some seconds pass; what is due then happens
		var n int
		fmt.Sscan(opt["s"], &n)
		s.now = s.now.Add(time.Duration(n) * time.Second)
		if at, ok := s.m.Deadline(); ok && !s.now.Before(at) {
			s.step(t, Tick{})
		}
	case "reset":
		var ticket uint64
		fmt.Sscan(opt["ticket"], &ticket)
		s.step(t, ResetCache{Ticket: ticket, Wait: opt["wait"] == "true"})
	case "give-up-reset":
		var ticket uint64
		fmt.Sscan(opt["ticket"], &ticket)
		s.step(t, GiveUpReset{Ticket: ticket})
	case "drain":
		s.step(t, Drain{})
	case "found", "progress", "loaded", "stored": // ticket, blocks
		var ticket uint64
		var n int
		fmt.Sscan(opt["ticket"], &ticket)
		fmt.Sscan(opt["blocks"], &n)
		s.step(t, map[string]Event{
			"found": TierFound{Ticket: ticket, Blocks: n}, "progress": TierProgress{Ticket: ticket, Blocks: n}, "loaded": TierLoaded{Ticket: ticket, Blocks: n}, "stored": TierStored{Ticket: ticket},
		}[fields[0]])
	case "refuse":
		s.conn.refuse = &connector.Error{Request: id, Phase: connector.PhaseParams, Reason: "remote_host is missing"}
	case "accept":
		s.conn.refuse = nil
	default:
		t.Fatalf("unknown event %q", line)
	}
}

func (s *scenario) step(t *testing.T, e Event) {
	for _, a := range s.m.Step(s.now, e) {
		if r, ok := a.(RunStep); ok {
			if s.batch != nil {
				t.Fatal("two steps in flight")
			}
			s.batch = r.Batch
		}
		fmt.Fprintln(&s.out, describe(a))
	}
	if err := s.m.Check(); err != nil {
		t.Fatal(err)
	}
}
