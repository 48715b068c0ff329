package intake

import (
	"fmt"

	"github.com/kvferry/kvferry/tier/core"
)

// Config bounds an Intake. Zeros mean the defaults.
type Config struct {
	Batches   int // under way at a time
	BatchKeys int // of one batch
	PeerKeys  int // waiting, of one peer
}

// Validate reports a configuration that cannot work.
func (c Config) Validate() error {
	if c.Batches < 0 || c.BatchKeys < 0 || c.PeerKeys < 0 {
		return fmt.Errorf("intake: a bound is negative: %+v", c)
	}
	return nil
}

// Batch is a fetch that is to be made.
type Batch[P comparable] struct {
	ID   uint64 // from 1, never used twice
	Peer P
	Keys []core.Key
}

// Stats are counts for people.
type Stats struct {
	Waiting, Batches int    // now: blocks that wait, batches under way
	Offered, Dropped uint64 // blocks: in all, and those that found their queue full
	Known            uint64 // blocks that were here when their turn came
}

// Intake is the queue of what is offered. P names a peer's session.
type Intake[P comparable] struct {
	cfg     Config
	peers   map[P]*peer
	turns   []P // peers with something waiting and nothing under way, in turn
	batches map[uint64]P
	lastID  uint64
	stopped bool
	stats   Stats
}

type peer struct {
	waiting []core.Key
	queued  map[core.Key]struct{} // those in waiting
	busy    bool                  // a batch of it is under way
}

// New makes an empty Intake. The configuration must be valid.
func New[P comparable](cfg Config) *Intake[P] {
	for v, d := range map[*int]int{&cfg.Batches: DefaultBatches, &cfg.BatchKeys: DefaultBatchKeys, &cfg.PeerKeys: DefaultPeerKeys} {
		if *v == 0 {
			*v = d
		}
	}
	return &Intake[P]{cfg: cfg, peers: map[P]*peer{}, batches: map[uint64]P{}}
}

// Offer notes what a peer has.
func (q *Intake[P]) Offer(from P, keys []core.Key) {
	q.stats.Offered += uint64(len(keys))
	if q.stopped {
		q.stats.Dropped += uint64(len(keys))
		return
	}
	p := q.peers[from]
	if p == nil {
		p = &peer{queued: map[core.Key]struct{}{}}
		q.peers[from] = p
	}
	idle := len(p.waiting) == 0
	for _, k := range keys {
		if _, twice := p.queued[k]; twice {
			continue
		}
		if len(p.waiting) >= q.cfg.PeerKeys {
			q.stats.Dropped++
			continue
		}
		p.queued[k] = struct{}{}
		p.waiting = append(p.waiting, k)
		q.stats.Waiting++
	}
	if idle && !p.busy && len(p.waiting) > 0 {
		q.turns = append(q.turns, from)
	}
	q.forget(from, p)
}

// Next takes the next batch, if there is one and a place for it. What have says is here already is left
// out.
func (q *Intake[P]) Next(have func(core.Key) bool) (Batch[P], bool) {
	for len(q.turns) > 0 && len(q.batches) < q.cfg.Batches {
		from := q.turns[0]
		q.turns = q.turns[1:]
		p := q.peers[from]
		var keys []core.Key
		taken := 0
		for _, k := range p.waiting {
			if len(keys) == q.cfg.BatchKeys {
				break
			}
			taken++
			delete(p.queued, k)
			if have(k) {
				q.stats.Known++
				continue
			}
			keys = append(keys, k)
		}
		q.stats.Waiting -= taken
		if p.waiting = p.waiting[taken:]; len(p.waiting) == 0 {
			p.waiting = nil
		}
		if len(keys) == 0 {
			q.forget(from, p)
			continue
		}
		p.busy = true
		q.lastID++
		q.batches[q.lastID] = from
		return Batch[P]{ID: q.lastID, Peer: from, Keys: keys}, true
	}
	return Batch[P]{}, false
}

// Ended says that a batch is over, however it went.
func (q *Intake[P]) Ended(id uint64) {
	from, ok := q.batches[id]
	if !ok {
		return
	}
	delete(q.batches, id)
	p := q.peers[from]
	p.busy = false
	if len(p.waiting) > 0 {
		q.turns = append(q.turns, from)
	}
	q.forget(from, p)
}

// Gone says that a peer's session is over: nothing more can be fetched from it.
func (q *Intake[P]) Gone(from P) {
	p := q.peers[from]
	if p == nil {
		return
	}
	q.clear(p)
	q.dropTurns(func(x P) bool { return x == from })
	q.forget(from, p)
}

// Stop forgets what waits and takes nothing more; batches under way go on.
func (q *Intake[P]) Stop() {
	q.stopped = true
	for from, p := range q.peers {
		q.clear(p)
		q.forget(from, p)
	}
	q.turns = nil
}

// Stats counts.
func (q *Intake[P]) Stats() Stats {
	s := q.stats
	s.Batches = len(q.batches)
	return s
}

func (q *Intake[P]) clear(p *peer) {
	q.stats.Waiting -= len(p.waiting)
	q.stats.Dropped += uint64(len(p.waiting))
	p.waiting, p.queued = nil, map[core.Key]struct{}{}
}

func (q *Intake[P]) dropTurns(which func(P) bool) {
	kept := q.turns[:0:0]
	for _, x := range q.turns {
		if !which(x) {
			kept = append(kept, x)
		}
	}
	q.turns = kept
}

// forget drops a peer of which nothing is left.
func (q *Intake[P]) forget(from P, p *peer) {
	if !p.busy && len(p.waiting) == 0 {
		delete(q.peers, from)
	}
}
