package scheduler

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// model is a dumb engine around a Half: it remembers what it was promised and complains when a
// promise is broken. It shares no code with the Half.
type model struct {
	t     *rapid.T
	h     *Half
	ranks int
	pull  bool
	both  bool // bidirectional
	most  int  // fewer tokens than the threshold are not transferred
	now   time.Time

	running map[kv.RequestID]*modelRequest // arrived, the engine has not finished it
	held    map[kv.RequestID]*modelRequest // finished, an outcome is owed
	workers []map[kv.RequestID]*modelWork  // per rank: what it was told to do and has not reported
	last    connector.WorkerOutput         // the last report
}

type modelRequest struct {
	id        kv.RequestID
	producer  bool
	earlier   bool // P: what a D kept may be read
	prompt    int
	remote    int // tokens that the peer keeps and the prompt shares
	allocated bool
	pending   bool // D: allocated with external tokens, Received or ReceiveFailed is owed
	bornAt    time.Time
	reports   int
	failed    bool // a rank said so
	shipped   bool
	deadline  time.Time // D: of its watchdog
	givenUp   bool      // D: nobody wants it any more
	cancelled bool      // D: the workers were told so
	lease     kv.Generation
	released  bool // P: nobody wants its hold any more
	letGo     bool // P: the workers were told so
}

// asks tells whether a peer may bring KV.
func (q *modelRequest) asks() bool { return !q.producer || q.earlier }

// modelWork is one rank's part; it outlives the request in the engine.
type modelWork struct {
	of        *modelRequest
	producer  bool
	cancelled bool
}

func TestLedgerAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, 3).Draw(t, "ranks")
		mode := rapid.SampledFrom([]kv.TransferMode{kv.Push, kv.Pull}).Draw(t, "mode")
		both := mode == kv.Pull && rapid.Bool().Draw(t, "bidirectional")
		threshold := rapid.SampledFrom([]int{0, 6}).Draw(t, "threshold")
		h, err := New(Config{Engine: "E", Host: "e", Port: 1, TP: ranks, Role: connector.Both, Mode: mode, BlockSize: 4, Bidirectional: both,
			Clock: func(at time.Time) float64 { return float64(at.Unix()) }, RecomputeThreshold: threshold})
		if err != nil {
			t.Fatal(err)
		}
		m := &model{t: t, h: h, ranks: ranks, pull: mode == kv.Pull, both: both, most: threshold, now: time.Unix(1000, 0), running: map[kv.RequestID]*modelRequest{}, held: map[kv.RequestID]*modelRequest{}}
		for range ranks {
			m.workers = append(m.workers, map[kv.RequestID]*modelWork{})
		}
		t.Repeat(map[string]func(*rapid.T){
			"arrive":   m.arrive,
			"allocate": m.allocate,
			"finish":   m.finish,
			"metadata": m.metadata,
			"report":   m.report,
			"garbage":  m.garbage,
			"again":    m.again,
			"release":  m.release,
			"time":     m.time,
			"":         m.check,
		})
		m.drain()
	})
}

func (m *model) id(t *rapid.T) kv.RequestID {
	return kv.RequestID(rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "id"))
}

func (m *model) arrive(t *rapid.T) {
	id := m.id(t)
	q := &modelRequest{id: id, producer: rapid.Bool().Draw(t, "producer"), prompt: rapid.IntRange(1, 20).Draw(t, "prompt"), bornAt: m.now}
	r := connector.Request{ID: id, PromptTokens: q.prompt, Params: kv.TransferParams{DoRemoteDecode: true}}
	if !q.producer {
		r.Params = kv.TransferParams{DoRemotePrefill: true, RemoteEngineID: "P", RemoteRequestID: "R", RemoteHost: "p", RemotePort: 1, TPSize: m.ranks}
		q.remote = q.prompt
		if m.pull {
			r.Params.RemoteBlockIDs = kv.BlockIDs{{1}}
			if n := rapid.IntRange(0, 25).Draw(t, "remote tokens"); n > 0 {
				r.Params.RemoteNumTokens = n
				q.remote = min(n, q.prompt)
			}
		}
	}
	if q.producer && m.pull && rapid.Bool().Draw(t, "earlier") {
		n := rapid.IntRange(0, 25).Draw(t, "earlier tokens")
		q.earlier = true
		if q.remote = n; n > q.prompt {
			q.remote = q.prompt - q.prompt%4
		}
		r.Params = kv.TransferParams{DoRemoteDecode: true, RemoteEngineID: "D", RemoteRequestID: "R", RemoteHost: "d", RemotePort: 1, TPSize: m.ranks,
			RemoteBlockIDs: kv.BlockIDs{{1, 2}}, RemoteNumTokens: n}
	}
	err := m.h.Arrived(m.now, r)
	// A local request that is over for the Half may still run in the engine under its id; the
	// engine never lets two live requests have one id.
	if m.running[id] != nil || m.held[id] != nil {
		if err == nil && m.held[id] != nil {
			t.Fatalf("request %s was taken while its blocks are held", id)
		}
		if err == nil {
			m.h.Finished(m.now, id, connector.FinishAbort, nil, 0)
			// The Half had forgotten the running one; what it took now it forgets again.
		}
		return
	}
	if err != nil {
		t.Fatalf("request %s: %v", id, err)
	}
	m.running[id] = q
}

func (m *model) pick(t *rapid.T, of map[kv.RequestID]*modelRequest) *modelRequest {
	if len(of) == 0 {
		t.Skip("none")
	}
	return of[rapid.SampledFrom(slices.Sorted(maps.Keys(of))).Draw(t, "request")]
}

func (m *model) allocate(t *rapid.T) {
	q := m.pick(t, m.running)
	computed := 4 * rapid.IntRange(0, (q.prompt-1)/4).Draw(t, "hit")
	external := m.h.External(q.id, computed)
	switch {
	case (!q.asks() || q.allocated) && external != 0:
		t.Fatalf("%d external tokens for request %s, which has none left", external, q.id)
	case q.asks() && !q.allocated && external != m.external(q, computed):
		t.Fatalf("%d external tokens for request %s with %d of %d computed", external, q.id, computed, q.prompt)
	}
	if q.pending {
		return // an engine never allocates for it again; a Skip after a draw would end the sequence
	}
	if !q.allocated && rapid.Bool().Draw(t, "full hit") {
		external = 0
	}
	blocks := make([]kv.BlockID, (q.prompt+3)/4+rapid.IntRange(0, 2).Draw(t, "more blocks"))
	if rapid.IntRange(0, 9).Draw(t, "misfit") == 0 {
		blocks = blocks[:0]
	}
	m.h.Allocated(m.now, q.id, kv.BlockIDs{blocks}, computed, external)
	q.allocated = true
	q.pending = external > 0
	q.deadline = m.now.Add(connector.DefaultRegistrationTimeout)
}

// external is what a peer is to bring.
func (m *model) external(q *modelRequest, computed int) int {
	if m.pull && computed > 0 && q.prompt-computed <= 1 {
		return 0 // the last token is computed here anyway
	}
	if q.earlier && !m.both || q.remote-computed < m.most {
		return 0
	}
	return max(0, q.remote-computed)
}

func (m *model) finish(t *rapid.T) {
	q := m.pick(t, m.running)
	reason := rapid.SampledFrom([]connector.FinishReason{connector.FinishAbort, connector.FinishLength, connector.FinishStop, connector.FinishError}).Draw(t, "reason")
	if q.pending {
		reason = connector.FinishAbort
	}
	n := rapid.IntRange(0, 6).Draw(t, "blocks")
	hold, params := m.h.Finished(m.now, q.id, reason, kv.BlockIDs{make([]kv.BlockID, n)}, 4*n)
	done := reason == connector.FinishLength || reason == connector.FinishStop
	computes := q.producer && (!q.earlier || q.allocated)   // P
	goesOn := !q.producer && m.both && q.allocated && n > 0 // D, whose blocks are for the next turn
	wantHold := (computes && n > 0 || goesOn) && done || q.pending && q.shipped
	if hold != wantHold {
		t.Fatalf("request %+v ends as %s with %d blocks: hold %v", *q, reason, n, hold)
	}
	if (params != nil) != ((computes || goesOn) && done) || params != nil && params.DoRemoteDecode == q.producer {
		t.Fatalf("request %+v ends as %s: params %v", *q, reason, params)
	}
	if goesOn && done {
		m.h.Kept(q.id, connector.Digest{1}, nil)
	}
	delete(m.running, q.id)
	if hold {
		m.held[q.id] = q
		q.givenUp = q.givenUp || q.pending
		if params != nil {
			q.lease = params.Lease
		}
		if rapid.Bool().Draw(t, "abort again") {
			if again, _ := m.h.Finished(m.now, q.id, connector.FinishAbort, nil, 0); !again {
				t.Fatalf("a second end gives up the hold of %s", q.id)
			}
		}
	}
}

func (m *model) metadata(t *rapid.T) {
	meta, ok := m.h.Metadata(m.now)
	if ok != (len(meta.Registrations)+len(meta.Reads)+len(meta.Dropped)+len(meta.Withdrawn)+len(meta.Queued)+len(meta.Processing)+len(meta.Finished)+len(meta.Released)+len(meta.Cancels) > 0 || meta.HasHeartbeats) {
		t.Fatalf("metadata %v: %+v", ok, meta)
	}
	asked := meta.Registrations
	for _, r := range meta.Reads {
		asked = append(asked, r.Registration)
		if q := m.running[r.ID]; len(r.RemoteBlocks) != 1 || r.Remote != "R" || r.Readers != 1 || q == nil || r.Earlier != q.earlier {
			t.Fatalf("read %+v", r)
		}
	}
	if m.pull && len(meta.Registrations)+len(meta.Queued)+len(meta.Processing)+len(meta.Dropped) > 0 || !m.pull && len(meta.Reads) > 0 {
		t.Fatalf("metadata of the other mode: %+v", meta)
	}
	for _, r := range asked {
		q := m.running[r.ID]
		if q == nil || !q.pending || q.shipped {
			t.Fatalf("registration of %s, which does not wait", r.ID)
		}
		q.shipped = true
		m.give(r.ID, &modelWork{of: q})
		if want := (q.remote+3)/4 - r.StartToken/4; len(r.Blocks) != 1 || len(r.Blocks[0]) != want || r.NumTokens != q.remote {
			t.Fatalf("registration of %v for tokens %d to %d", r.Blocks, r.StartToken, q.remote)
		}
	}
	for _, f := range meta.Finished {
		q := m.held[f.ID]
		if q == nil || q.pending || f.Earlier == q.producer || f.Earlier && f.Digest != (connector.Digest{1}) {
			t.Fatalf("finished %s, which is not held", f.ID)
		}
		m.give(f.ID, &modelWork{of: q, producer: true})
	}
	for _, r := range meta.Released {
		q := m.held[r.ID]
		if q == nil || !q.released || q.letGo || q.lease != r.Lease {
			t.Fatalf("release of %+v, which is %+v", r, q)
		}
		q.letGo = true
	}
	for id, q := range m.held {
		if q.released && !q.letGo {
			t.Fatalf("the hold of %s is released and the workers are not told", id)
		}
	}
	for _, id := range meta.Cancels {
		q := m.running[id]
		if q == nil {
			q = m.held[id]
		}
		if q == nil || !q.asks() || !q.givenUp || q.cancelled {
			t.Fatalf("cancel of %s, which is %+v", id, q)
		}
		q.cancelled = true
		for _, w := range m.workers {
			if x := w[id]; x != nil {
				x.cancelled = true
			}
		}
	}
	for _, of := range []map[kv.RequestID]*modelRequest{m.running, m.held} {
		for id, q := range of {
			if q.givenUp && q.shipped && !q.cancelled && (q.pending || of[id] == m.held[id]) {
				t.Fatalf("%s is given up and the workers are not told", id)
			}
		}
	}
	waiting := 0
	for _, q := range m.running {
		if !q.producer && (!q.allocated || q.pending && !q.failed) {
			waiting++
		}
	}
	if meta.HasHeartbeats && waiting == 0 && len(meta.Heartbeats) > 0 {
		t.Fatalf("heartbeats %v for nobody", meta.Heartbeats)
	}
}

// release gives up a hold, or what is none: only a hold of the right lease, and only once.
func (m *model) release(t *rapid.T) {
	id := m.id(t)
	lease := kv.Generation(rapid.IntRange(0, 2).Draw(t, "lease"))
	q := m.held[id]
	if q != nil && rapid.IntRange(0, 3).Draw(t, "right") > 0 {
		lease = q.lease
	}
	want := q != nil && q.lease != 0 && q.lease == lease && !q.released
	if got := m.h.Release(id, lease); got != want {
		t.Fatalf("release of %s with lease %d: %v, it is %+v", id, lease, got, q)
	}
	if want {
		q.released = true
	}
}

func (m *model) give(id kv.RequestID, w *modelWork) {
	for i := range m.workers {
		if m.workers[i][id] != nil {
			m.t.Fatalf("rank %d was given %s twice", i, id)
		}
		x := *w
		m.workers[i][id] = &x
	}
}

func (m *model) report(t *rapid.T) {
	rank := rapid.IntRange(0, m.ranks-1).Draw(t, "rank")
	if len(m.workers[rank]) == 0 {
		return // a Skip after a draw would end the sequence
	}
	id := rapid.SampledFrom(slices.Sorted(maps.Keys(m.workers[rank]))).Draw(t, "work")
	m.tell(rank, id, rapid.IntRange(0, 3).Draw(t, "fails") == 0)
}

func (m *model) tell(rank int, id kv.RequestID, fails bool) {
	w := m.workers[rank][id]
	delete(m.workers[rank], id)
	fails = fails || w.cancelled
	out := connector.WorkerOutput{Rank: kv.Rank{TP: rank}}
	var err *connector.Error
	if fails {
		err = &connector.Error{Request: id, Phase: connector.PhaseTransfer, Reason: "it broke"}
	}
	if w.producer {
		out.Sent = []connector.SentReport{{ID: id, Err: err}}
	} else {
		out.Recv = []connector.ReceiveReport{{ID: id, Err: err}}
	}
	w.of.reports++
	m.last = out
	w.of.failed = w.of.failed || fails
	w.of.givenUp = w.of.givenUp || fails && !w.producer
	m.outcomes(m.h.Update(m.now, out))
}

func (m *model) garbage(t *rapid.T) {
	id := kv.RequestID("nobody")
	rank := kv.Rank{TP: rapid.IntRange(-1, m.ranks).Draw(t, "rank"), PP: rapid.IntRange(0, 1).Draw(t, "stage")}
	if out := m.h.Update(m.now, connector.WorkerOutput{Rank: rank, Sent: []connector.SentReport{{ID: id}}, Recv: []connector.ReceiveReport{{ID: id}}}); out != nil {
		t.Fatalf("outcomes of nothing: %v", out)
	}
}

func (m *model) time(t *rapid.T) {
	m.now = m.now.Add(time.Duration(rapid.SampledFrom([]int{0, 1, 200, 480, 481}).Draw(t, "seconds")) * time.Second)
	for _, q := range m.running {
		if q.pending && q.shipped && !q.deadline.After(m.now) {
			q.givenUp = true
		}
	}
	m.outcomes(m.h.Expire(m.now))
	if at, ok := m.h.Deadline(); ok && !at.After(m.now) {
		t.Fatalf("the deadline %v is not after now, %v", at, m.now)
	}
}

// again gives the last report a second time; an id that was used again since is not meant.
func (m *model) again(t *rapid.T) {
	for _, id := range ids(m.last) {
		if q := m.running[id]; q != nil && q.shipped || m.held[id] != nil && m.workers[m.last.Rank.TP][id] != nil {
			t.Skip("the id is in use again")
		}
	}
	if out := m.h.Update(m.now, m.last); out != nil {
		t.Fatalf("a second copy of a report ends something: %v", out)
	}
}

func ids(o connector.WorkerOutput) (out []kv.RequestID) {
	for _, r := range o.Sent {
		out = append(out, r.ID)
	}
	for _, r := range o.Recv {
		out = append(out, r.ID)
	}
	return out
}

// outcomes checks what the engine is told against what it was promised.
func (m *model) outcomes(out []connector.Outcome) {
	for _, o := range out {
		switch o.Kind {
		case connector.Released:
			q := m.held[o.ID]
			if q == nil {
				m.t.Fatalf("%s is released but not held", o.ID)
			}
			if q.reports != m.ranks {
				m.t.Fatalf("%s is released after %d of %d reports", o.ID, q.reports, m.ranks)
			}
			if !q.pending && (o.Err != nil) != q.failed {
				m.t.Fatalf("%s is released with %v; a rank failed: %v", o.ID, o.Err, q.failed)
			}
			delete(m.held, o.ID)
		default:
			q := m.running[o.ID]
			if q == nil || !q.pending {
				m.t.Fatalf("outcome %+v of a request that does not wait", o)
			}
			if q.shipped && q.reports != m.ranks {
				m.t.Fatalf("outcome %+v after %d of %d reports: somebody may still write", o, q.reports, m.ranks)
			}
			if o.Kind == connector.Received && (q.failed || q.givenUp || !q.shipped || o.Err != nil) {
				m.t.Fatalf("%s is received although a rank failed", o.ID)
			}
			if o.Kind == connector.ReceiveFailed && o.Err == nil {
				m.t.Fatalf("%s failed without a reason", o.ID)
			}
			q.pending, q.shipped, q.failed, q.givenUp, q.cancelled, q.reports = false, false, false, false, false, 0
		}
	}
}

func (m *model) check(t *rapid.T) {
	s := m.h.Stats()
	if s.Requests > len(m.running)+len(m.held) {
		t.Fatalf("the ledger has %d requests, the engine %d running and %d held", s.Requests, len(m.running), len(m.held))
	}
	if s.HeldNow > len(m.held) {
		t.Fatalf("the ledger holds %d, the engine %d", s.HeldNow, len(m.held))
	}
}

// drain ends everything: afterwards every promise is kept and nothing is left.
func (m *model) drain() {
	for range 3 {
		m.metadata(m.t)
		for rank := range m.workers {
			for _, id := range slices.Sorted(maps.Keys(m.workers[rank])) {
				m.tell(rank, id, false)
			}
		}
		for _, id := range slices.Sorted(maps.Keys(m.running)) {
			q := m.running[id]
			q.givenUp = q.givenUp || q.pending
			if hold, _ := m.h.Finished(m.now, id, connector.FinishAbort, nil, 0); hold {
				m.held[id] = q
			}
			delete(m.running, id)
		}
		m.outcomes(m.h.Expire(m.now))
	}
	if len(m.held) > 0 {
		m.t.Fatalf("blocks are held for ever: %v", slices.Collect(maps.Keys(m.held)))
	}
	s := m.h.Stats()
	if s.Requests != 0 || s.Heartbeats != 0 || m.h.Pending() {
		m.t.Fatalf("left over: %+v", s)
	}
	if at, ok := m.h.Deadline(); ok {
		m.t.Fatalf("a deadline is left: %v", at)
	}
	_, _ = m.h.Metadata(m.now)
	if meta, ok := m.h.Metadata(m.now); ok {
		m.t.Fatalf("metadata without a cause: %+v", meta)
	}
}

// A ledger that is full refuses, and takes again when there is room.
func TestLedgerIsBounded(t *testing.T) {
	h, err := New(Config{Engine: "E", Host: "e", Port: 1, Role: connector.Both, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	arrive := func(i int) error {
		return h.Arrived(time.Unix(0, 0), connector.Request{ID: kv.RequestID(fmt.Sprint(i)), PromptTokens: 1, Params: kv.TransferParams{DoRemoteDecode: true}})
	}
	for i := range maxRequests {
		if err := arrive(i); err != nil {
			t.Fatal(err)
		}
	}
	if e, ok := arrive(maxRequests).(*connector.Error); !ok || e.Phase != connector.PhaseLimit {
		t.Errorf("one too many: %v", e)
	}
	h.Finished(time.Unix(0, 0), "7", connector.FinishAbort, nil, 0)
	if err := arrive(maxRequests); err != nil {
		t.Error(err)
	}
}

func TestConfigValidate(t *testing.T) {
	good := Config{Engine: "E", Host: "e", Port: 1, Role: connector.Both, BlockSize: 4}
	if _, err := New(good); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"Engine": func(c *Config) { c.Engine = "" }, "Host": func(c *Config) { c.Host = "" }, "Port": func(c *Config) { c.Port = 70000 },
		"TP": func(c *Config) { c.TP = -1 }, "ranks": func(c *Config) { c.TP, c.PP = maxRanks, 2 }, "Role": func(c *Config) { c.Role = "x" },
		"BlockSize": func(c *Config) { c.BlockSize = 0 }, "Lease": func(c *Config) { c.Lease = -1 },
		"RegistrationTimeout": func(c *Config) { c.RegistrationTimeout = -1 }, "RecomputeThreshold": func(c *Config) { c.RecomputeThreshold = -1 },
		"DecoderBlocksTTL": func(c *Config) { c.DecoderBlocksTTL = -1 }, "Clock": func(c *Config) { c.Mode, c.Bidirectional = kv.Pull, true },
		"Bidirectional": func(c *Config) { c.Bidirectional, c.Clock = true, func(time.Time) float64 { return 0 } },
	} {
		c := good
		change(&c)
		if _, err := New(c); err == nil {
			t.Errorf("%s: accepted %+v", name, c)
		}
	}
}
