package scheduler

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// The scenarios drive one Half with block size 4 and print all that comes out of it: results,
// outcomes, events, the metadata after each command unless it says "keep", and the deadline.
//
//	new [role=prefill] [tp=2] [mode=pull] [bidirectional] [threshold=8]
//	at t=5
//	arrive d1 decode tokens=10 [transfer=x] [remote=R] [without=host] [tp=2] [pp=2]   arrive p1 prefill tokens=10
//	                                in pull: [from=(5,6,7)] [second=(8)] [remote-tokens=9] [readers=2] [mode=push]
//	arrive p2 prefill tokens=10 from=(5,6) remote-tokens=9 [expiry=100] ...    what D kept of an earlier turn
//	external d1 computed=4          allocate d1 blocks=(1,2,3) computed=4 external=6
//	finish d1 reason=abort blocks=(1,2) [second=(3)] computed=10 [kept=2]      the number of digests by block
//	sent p1 rank=0 [err]            received d1 rank=0 [err] [bytes=5]
//	release p1 lease=1000000000     its hold is not wanted any more
//	progress d1                     its prefill engine works on it
//	meta                            take what was kept
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		s := &scenario{start: time.Unix(1000, 0)}
		s.now = s.start
		s.reset(t, Config{Role: connector.Both})
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
	})
}

type scenario struct {
	h          *Half
	start, now time.Time
	events     []event.Event
}

func (s *scenario) reset(t *testing.T, cfg Config) {
	cfg.Engine, cfg.Host, cfg.Port, cfg.BlockSize = "E", "e", 5600, 4
	cfg.Clock = func(at time.Time) float64 { return at.Sub(s.start).Seconds() }
	cfg.Events = event.SinkFunc(func(e event.Event) { s.events = append(s.events, e) })
	h, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.h = h
}

func arg(d *datadriven.TestData, key string) (string, bool) {
	for _, a := range d.CmdArgs {
		if a.Key == key {
			return strings.Join(a.Vals, ","), true
		}
	}
	return "", false
}

func argInt(t *testing.T, d *datadriven.TestData, key string, def int) int {
	s, ok := arg(d, key)
	if !ok {
		return def
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		d.Fatalf(t, "%s: %v", key, err)
	}
	return n
}

func argBlocks(t *testing.T, d *datadriven.TestData, first string) kv.BlockIDs {
	var out kv.BlockIDs
	for _, key := range []string{first, "second"} { // group
		g, ok := arg(d, key)
		if !ok {
			continue
		}
		var group []kv.BlockID
		for f := range strings.SplitSeq(g, ",") {
			if f = strings.Trim(f, " ()"); f == "" {
				continue
			}
			n, err := strconv.Atoi(f)
			if err != nil {
				d.Fatalf(t, "blocks: %v", err)
			}
			group = append(group, kv.BlockID(n))
		}
		out = append(out, group)
	}
	return out
}

func (s *scenario) run(t *testing.T, d *datadriven.TestData) string {
	var b strings.Builder
	var out []connector.Outcome
	id := kv.RequestID("")
	if len(d.CmdArgs) > 0 {
		id = kv.RequestID(d.CmdArgs[0].Key)
	}
	keep := false
	if _, ok := arg(d, "keep"); ok {
		keep = true
	}
	var failure *connector.Error
	if _, ok := arg(d, "err"); ok {
		failure = &connector.Error{Request: id, Peer: "Q", Phase: connector.PhaseTransfer, Reason: "it broke"}
	}
	rank := kv.Rank{TP: argInt(t, d, "rank", 0)}
	switch d.Cmd {
	case "new":
		role := connector.Both
		if r, ok := arg(d, "role"); ok {
			role = connector.Role(r)
		}
		mode, _ := arg(d, "mode")
		_, both := arg(d, "bidirectional")
		s.reset(t, Config{TP: argInt(t, d, "tp", 1), Role: role, Mode: kv.TransferMode(mode), Bidirectional: both,
			RecomputeThreshold: argInt(t, d, "threshold", 0)})
	case "at":
		s.now = s.start.Add(time.Duration(argInt(t, d, "t", 0)) * time.Second)
		out = s.h.Expire(s.now)
	case "arrive":
		if err := s.h.Arrived(s.now, s.request(t, d, id)); err != nil {
			fmt.Fprintf(&b, "refused: %v\n", err)
		}
	case "external":
		fmt.Fprintf(&b, "%d tokens\n", s.h.External(id, argInt(t, d, "computed", 0)))
	case "allocate":
		s.h.Allocated(s.now, id, argBlocks(t, d, "blocks"), argInt(t, d, "computed", 0), argInt(t, d, "external", 0))
	case "finish":
		reason, _ := arg(d, "reason")
		hold, p := s.h.Finished(s.now, id, connector.FinishReason(reason), argBlocks(t, d, "blocks"), argInt(t, d, "computed", 0))
		fmt.Fprintf(&b, "hold %v\n", hold)
		if p != nil {
			fmt.Fprintf(&b, "answer prefill=%v decode=%v blocks=%v engine=%s request=%s at %s:%d tp=%d dcp=%d pp=%d tokens=%d mode=%s lease=%v\n",
				p.DoRemotePrefill, p.DoRemoteDecode, p.RemoteBlockIDs, p.RemoteEngineID, p.RemoteRequestID, p.RemoteHost, p.RemotePort,
				p.TPSize, p.DCPSize, p.PPSize, p.RemoteNumTokens, p.Mode, p.Lease)
			if p.RemoteBlocksExpiry != nil {
				fmt.Fprintf(&b, "expiry %v\n", *p.RemoteBlocksExpiry)
			}
		}
		if n := argInt(t, d, "kept", -1); n >= 0 {
			s.h.Kept(id, connector.Digest{9}, make([]connector.Digest, n))
		}
	case "sent":
		out = s.h.Update(s.now, connector.WorkerOutput{Rank: rank, Sent: []connector.SentReport{{ID: id, Err: failure}}})
	case "received":
		out = s.h.Update(s.now, connector.WorkerOutput{Rank: rank, Recv: []connector.ReceiveReport{{ID: id, Err: failure,
			Transfer: connector.TransferFacts{Blocks: 2, Bytes: int64(argInt(t, d, "bytes", 0)), Took: time.Duration(argInt(t, d, "took", 0)),
				Waited: time.Duration(argInt(t, d, "waited", 0)), Transport: fmt.Sprintf("rank%d", rank.TP)}}}})
	case "progress":
		out = s.h.Update(s.now, connector.WorkerOutput{Rank: rank, Progress: []kv.RequestID{id}})
	case "release":
		fmt.Fprintf(&b, "released %v\n", s.h.Release(id, kv.Generation(argInt(t, d, "lease", 0))))
	case "meta":
	default:
		d.Fatalf(t, "unknown command %q", d.Cmd)
	}
	for _, o := range out {
		fmt.Fprintf(&b, "OUTCOME %s %s", o.ID, [...]string{"received", "receive failed", "released"}[o.Kind])
		if o.Err != nil {
			fmt.Fprintf(&b, " (%s: %s)", o.Err.Phase, o.Err.Reason)
		}
		if o.Transfer != (connector.TransferFacts{}) {
			fmt.Fprintf(&b, " %+v", o.Transfer)
		}
		b.WriteString("\n")
	}
	for _, e := range s.events {
		fmt.Fprintf(&b, "event %s %+v\n", e.Kind(), e)
	}
	s.events = nil
	if !keep {
		s.showMeta(&b)
	}
	if at, ok := s.h.Deadline(); ok {
		fmt.Fprintf(&b, "next at %v\n", at.Sub(s.start))
	}
	if st := s.h.Stats(); st.UnknownReports+st.DuplicateReports > 0 {
		fmt.Fprintf(&b, "so far %d unknown, %d duplicate reports\n", st.UnknownReports, st.DuplicateReports)
	}
	return b.String()
}

func (s *scenario) request(t *testing.T, d *datadriven.TestData, id kv.RequestID) connector.Request {
	r := connector.Request{ID: id, PromptTokens: argInt(t, d, "tokens", 0), Digest: connector.Digest{7}}
	if x, ok := arg(d, "transfer"); ok {
		r.Params.TransferID = kv.TransferID(x)
	}
	_, prefill := arg(d, "prefill")
	_, decode := arg(d, "decode")
	r.Params.DoRemoteDecode, r.Params.DoRemotePrefill = prefill, decode
	if _, named := arg(d, "from"); decode || named {
		p := &r.Params
		if prefill {
			r.Earlier = connector.Digest{8}
		}
		if n := argInt(t, d, "expiry", -1); n >= 0 {
			at := float64(n)
			p.RemoteBlocksExpiry = &at
		}
		p.RemoteEngineID, p.RemoteRequestID, p.RemoteHost, p.RemotePort, p.TPSize = "Q", "R", "q", 5600, argInt(t, d, "tp", 1)
		p.PPSize = argInt(t, d, "pp", 1)
		p.Lease = kv.Generation(argInt(t, d, "lease", 0))
		p.RemoteBlockIDs = argBlocks(t, d, "from")
		p.RemoteNumTokens = argInt(t, d, "remote-tokens", 0)
		p.Readers = argInt(t, d, "readers", 0)
		mode, _ := arg(d, "mode")
		p.Mode = kv.TransferMode(mode)
		if x, ok := arg(d, "remote"); ok {
			p.RemoteRequestID = kv.RequestID(x)
		}
		if x, ok := arg(d, "engine"); ok {
			p.RemoteEngineID = kv.EngineID(x)
		}
		switch x, _ := arg(d, "without"); x {
		case "engine":
			p.RemoteEngineID = ""
		case "request":
			p.RemoteRequestID = ""
		case "host":
			p.RemoteHost = ""
		case "port":
			p.RemotePort = 0
		case "tp":
			p.TPSize = 0
		}
	}
	return r
}

func (s *scenario) showMeta(b *strings.Builder) {
	m, ok := s.h.Metadata(s.now)
	if !ok {
		return
	}
	for _, r := range m.Registrations {
		fmt.Fprintf(b, "META register %s transfer=%q blocks=%v from token %d of %d prompt %d with %s at %s:%d tp %d pp %d%s\n",
			r.ID, r.TransferID, r.Blocks, r.StartToken, r.NumTokens, r.Digest[0], r.Peer.Engine, r.Peer.Host, r.Peer.Port, r.Peer.TP, r.Peer.PP, leaseText(r.Lease))
	}
	for _, r := range m.Reads {
		fmt.Fprintf(b, "META read %s into %v from token %d of %d prompt %d out of %s %v readers %d with %s at %s:%d tp %d pp %d%s%s\n",
			r.ID, r.Blocks, r.StartToken, r.NumTokens, r.Digest[0], r.Remote, r.RemoteBlocks, r.Readers, r.Peer.Engine, r.Peer.Host, r.Peer.Port, r.Peer.TP, r.Peer.PP, leaseText(r.Lease), earlierText(&r))
	}
	for _, q := range m.Queued {
		fmt.Fprintf(b, "META queue %s transfer=%q prompt %d\n", q.ID, q.TransferID, q.Digest[0])
	}
	for _, id := range m.Processing {
		fmt.Fprintf(b, "META process %s\n", id)
	}
	for _, f := range m.Finished {
		fmt.Fprintf(b, "META finish %s transfer=%q blocks=%v tokens=%d lease=%v prompt %d", f.ID, f.TransferID, f.Blocks, f.NumTokens, f.Lease, f.Digest[0])
		if f.Earlier {
			fmt.Fprintf(b, " for the next turn, %d prefixes", len(f.Prefixes))
		}
		b.WriteString("\n")
	}
	for _, r := range m.Released {
		fmt.Fprintf(b, "META release %s lease %d\n", r.ID, r.Lease)
	}
	for _, x := range m.Dropped {
		fmt.Fprintf(b, "META drop %s transfer=%q: %s\n", x.ID, x.TransferID, x.Reason)
	}
	for _, id := range m.Cancels {
		fmt.Fprintf(b, "META cancel %s\n", id)
	}
	for _, w := range m.Withdrawn {
		fmt.Fprintf(b, "META withdraw %s transfer=%q remote=%s prompt %d from %s: %s\n", w.ID, w.TransferID, w.Remote, w.Digest[0], w.Peer.Engine, w.Reason)
	}
	if m.HasHeartbeats {
		fmt.Fprintf(b, "META heartbeats")
		for _, g := range m.Heartbeats {
			fmt.Fprintf(b, " %s:%v", g.Peer.Engine, g.IDs)
		}
		b.WriteString("\n")
	}
}

func earlierText(r *connector.Read) string {
	switch {
	case !r.Earlier:
		return ""
	case r.Expiry == nil:
		return " of an earlier turn"
	}
	return fmt.Sprintf(" of an earlier turn, expiry %v", *r.Expiry)
}

func leaseText(g kv.Generation) string {
	if g == 0 {
		return ""
	}
	return fmt.Sprintf(" lease %d", g)
}
