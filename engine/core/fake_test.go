package core

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// fakeConn is a Connector that a test steers: what the workers report is what the test says, and
// what they report decides. It also checks that the machine keeps to the order of calls that the
// interface states.
type fakeConn struct {
	trace func(format string, args ...any)
	fatal func(args ...any)

	reqs     map[kv.RequestID]*fakeReq
	pending  []string // for the next Metadata
	external int      // fewer tokens than asked for, if positive
	both     bool     // decode requests are kept for the next turn, prefill requests that name an earlier one read it
	refuse   error
	deadline time.Time
	expired  []connector.Outcome
	fresh    []*fakeReq // allocated since the world looked last
}

type fakeReq struct {
	connector.Request
	allocated  bool
	finished   bool
	receiving  bool // blocks are registered, no outcome yet
	holding    bool // Finished said hold
	released   bool // and it was given up
	turn       bool // and that for the next turn
	kept       bool // and was told of what
	blocks     []kv.BlockID
	computed   int
	external   int
	epoch      int // of the prefix cache when its blocks were given
	finishedAs connector.FinishReason
	whole      connector.Digest
	prefixes   []connector.Digest
}

func newFakeConn(fatal func(args ...any)) *fakeConn {
	return &fakeConn{reqs: map[kv.RequestID]*fakeReq{}, fatal: fatal, trace: func(string, ...any) {}}
}

func (f *fakeConn) Arrived(_ time.Time, r connector.Request) error {
	if f.refuse != nil {
		return f.refuse
	}
	if f.reqs[r.ID] != nil {
		f.fatal("Arrived twice: ", r.ID)
	}
	f.reqs[r.ID] = &fakeReq{Request: r}
	return nil
}

func (f *fakeConn) External(id kv.RequestID, computed int) int {
	q := f.reqs[id]
	if q == nil || q.allocated || q.finished {
		f.fatal("External out of order: ", id)
	}
	n := q.PromptTokens - computed
	if q.Params.DoRemoteDecode {
		n = min(q.PromptTokens, q.Params.RemoteNumTokens) - computed
		if !f.both {
			n = 0
		}
	}
	if f.external > 0 {
		n = min(n, f.external)
	}
	return n
}

func (f *fakeConn) Allocated(_ time.Time, id kv.RequestID, blocks kv.BlockIDs, computed, external int) {
	q := f.reqs[id]
	if q == nil || q.allocated || q.finished {
		f.fatal("Allocated out of order: ", id)
	}
	q.allocated, q.receiving = true, external > 0
	q.blocks, q.computed, q.external = blocks[0], computed, external
	f.fresh = append(f.fresh, q)
	f.trace("allocated %s blocks=%v computed=%d external=%d", id, blocks[0], computed, external)
	if external > 0 {
		f.pending = append(f.pending, "register "+string(id))
	}
}

func (f *fakeConn) Finished(_ time.Time, id kv.RequestID, reason connector.FinishReason, blocks kv.BlockIDs, computed int) (bool, *kv.TransferParams) {
	q := f.reqs[id]
	if q == nil || q.finished {
		f.fatal("Finished out of order: ", id)
	}
	if q.receiving && reason != connector.FinishAbort {
		f.fatal("Finished while receiving: ", id)
	}
	q.finished, q.finishedAs = true, reason
	ok := reason == connector.FinishLength || reason == connector.FinishStop
	var params *kv.TransferParams
	if f.both && q.Params.DoRemotePrefill && ok && q.allocated {
		q.holding, q.turn, q.blocks = true, true, blocks[0]
		q.kept = false
		params = &kv.TransferParams{DoRemoteDecode: true, RemoteRequestID: id, RemoteNumTokens: computed, Lease: fakeLease}
		f.pending = append(f.pending, "keep "+string(id))
	}
	if q.Params.DoRemoteDecode && ok {
		q.holding = true
		q.blocks = blocks[0]
		params = &kv.TransferParams{DoRemotePrefill: true, RemoteRequestID: id, Lease: fakeLease}
		f.pending = append(f.pending, "finished "+string(id))
	}
	if q.receiving {
		q.holding = true
		f.pending = append(f.pending, "cancel "+string(id))
	}
	f.trace("finished %s %s blocks=%v computed=%d hold=%v", id, reason, blocks[0], computed, q.holding)
	if !q.holding {
		delete(f.reqs, id)
	}
	return q.holding, params
}

func (f *fakeConn) Kept(id kv.RequestID, whole connector.Digest, prefixes []connector.Digest) {
	q := f.reqs[id]
	if q == nil || !q.turn || q.kept {
		f.fatal("Kept out of order: ", id)
	}
	q.kept, q.whole, q.prefixes = true, whole, prefixes
	f.trace("kept %s, %d prefixes", id, len(prefixes))
}

// fakeLease is the lease of every hold.
const fakeLease = 9

func (f *fakeConn) Release(id kv.RequestID, lease kv.Generation) bool {
	q := f.reqs[id]
	if q == nil || !isLeased(q) || lease != fakeLease || q.released {
		return false
	}
	q.released = true
	f.pending = append(f.pending, "release "+string(id))
	return true
}

func (f *fakeConn) Metadata(time.Time) (connector.StepMeta, bool) {
	for id, q := range f.reqs {
		if q.turn && !q.kept {
			f.fatal("nothing was told of what is kept of ", id)
		}
	}
	if len(f.pending) == 0 {
		return connector.StepMeta{}, false
	}
	var m connector.StepMeta
	for _, s := range f.pending {
		m.Processing = append(m.Processing, kv.RequestID(s)) // a place for words that the trace prints
	}
	f.pending = nil
	return m, true
}

func (f *fakeConn) Update(_ time.Time, out connector.WorkerOutput) []connector.Outcome {
	var os []connector.Outcome
	for _, r := range out.Recv {
		o := connector.Outcome{ID: r.ID, Kind: connector.Received, Err: r.Err, Transfer: r.Transfer}
		if r.Err != nil {
			o.Kind = connector.ReceiveFailed
		}
		if q := f.reqs[r.ID]; q != nil {
			q.receiving = false
			if q.finished {
				o.Kind = connector.Released
				delete(f.reqs, r.ID)
			}
		}
		os = append(os, o)
	}
	for _, r := range out.Sent {
		os = append(os, connector.Outcome{ID: r.ID, Kind: connector.Released, Err: r.Err})
		delete(f.reqs, r.ID)
	}
	return os
}

func (f *fakeConn) Expire(time.Time) []connector.Outcome {
	os := f.expired
	f.expired, f.deadline = nil, time.Time{}
	for _, o := range os {
		if q := f.reqs[o.ID]; q != nil {
			q.receiving = false
		}
	}
	return os
}

func (f *fakeConn) Deadline() (time.Time, bool) { return f.deadline, !f.deadline.IsZero() }

// The KV of the fake model: what a token's entry is depends on all tokens up to it, and the next
// token on all entries. A block that holds anything else than it should changes the answer.

func mix(h, v uint64) uint64 {
	h ^= v + 0x9e3779b97f4a7c15
	h *= 0xbf58476d1ce4e5b9
	return h ^ h>>29
}

// entries is the KV that tokens should have.
func entries(tokens []kv.Token) []uint64 {
	out := make([]uint64, len(tokens))
	h := uint64(1)
	for i, t := range tokens {
		h = mix(h, uint64(t)+7)
		out[i] = h
	}
	return out
}

const fakeVocab = 13

func nextToken(kv_ []uint64) kv.Token {
	h := uint64(3)
	for _, v := range kv_ {
		h = mix(h, v)
	}
	return kv.Token(h % fakeVocab)
}

// answer is what a request alone would be answered.
func answer(prompt []kv.Token, maxTokens, context int, stop []kv.Token) []kv.Token {
	tokens := slices.Clone(prompt)
	for {
		t := nextToken(entries(tokens))
		tokens = append(tokens, t)
		out := tokens[len(prompt):]
		if slices.Contains(stop, t) || maxTokens > 0 && len(out) >= maxTokens || len(tokens) >= context {
			return out
		}
	}
}

// memory is the cache of the fake model.
type memory struct {
	blockSize int
	slots     []uint64
	epochs    []int // per slot: of the prefix cache when the writer got its blocks
}

func newMemory(cfg Config) *memory {
	n := cfg.BlockSize * cfg.NumBlocks
	return &memory{blockSize: cfg.BlockSize, slots: make([]uint64, n), epochs: make([]int, n)}
}

func (m *memory) slot(blocks []kv.BlockID, position int) int {
	return int(blocks[position/m.blockSize])*m.blockSize + position%m.blockSize
}

// stamp marks positions as written by a request of an epoch.
func (m *memory) stamp(blocks []kv.BlockID, from, to, epoch int) {
	for p := from; p < to; p++ {
		m.epochs[m.slot(blocks, p)] = epoch
	}
}

func (m *memory) at(blocks []kv.BlockID, position int) *uint64 {
	return &m.slots[m.slot(blocks, position)]
}

func (m *memory) write(blocks []kv.BlockID, start int, values []uint64) {
	for i, v := range values {
		*m.at(blocks, start+i) = v
	}
}

func (m *memory) read(blocks []kv.BlockID, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = *m.at(blocks, i)
	}
	return out
}

// compute does what a model does with one sequence: it reads the KV before its tokens, writes
// theirs, and chooses a token.
func (m *memory) compute(s Sequence) Result {
	for i, t := range s.Tokens {
		h := uint64(1)
		if p := s.Start + i; p > 0 {
			h = *m.at(s.Blocks, p-1)
		}
		*m.at(s.Blocks, s.Start+i) = mix(h, uint64(t)+7)
	}
	if !s.Sample {
		return Result{}
	}
	return Result{Token: nextToken(m.read(s.Blocks, s.Start+len(s.Tokens)))}
}

func describe(a Action) string {
	switch a := a.(type) {
	case Refused:
		return fmt.Sprintf("refused %s: %v", a.ID, a.Err)
	case RunStep:
		var b strings.Builder
		b.WriteString("run")
		for _, s := range a.Batch {
			fmt.Fprintf(&b, "\n  %s start=%d tokens=%d blocks=%v sample=%v", s.ID, s.Start, len(s.Tokens), s.Blocks, s.Sample)
		}
		return b.String()
	case SendMeta:
		var words []string
		for _, w := range a.Meta.Processing {
			words = append(words, string(w))
		}
		return "meta " + strings.Join(words, ", ")
	case Emit:
		if a.Finish == "" {
			return fmt.Sprintf("emit %s %v", a.ID, a.Tokens)
		}
		usage := strings.Replace(fmt.Sprintf("%+v", a.Usage), " Tier:0}", "}", 1)
		s := fmt.Sprintf("emit %s %v finish=%s %s", a.ID, a.Tokens, a.Finish, usage)
		if a.Params != nil {
			s += fmt.Sprintf(" params=%s", a.Params.RemoteRequestID)
		}
		if a.Err != nil {
			s += fmt.Sprintf(" err=%q", a.Err)
		}
		if a.LoadErr != nil {
			s += fmt.Sprintf(" load-err=%q", a.LoadErr)
		}
		return s
	case HoldReleased:
		return fmt.Sprintf("hold of %s released: %v", a.ID, a.Released)
	case CacheReset:
		return fmt.Sprintf("reset %d: %d blocks forgotten, err=%v", a.Ticket, a.Blocks, a.Err)
	}
	if s, ok := describeTier(a); ok {
		return s
	}
	panic(a)
}
