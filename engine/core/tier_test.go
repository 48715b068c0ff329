package core

import (
	"fmt"
	"slices"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/kv"
)

// fakeTier is a tier that answers when, and as well as, a test says. It keeps what it is given, and
// checks that the machine keeps to the order that its actions promise.
type fakeTier struct {
	fatal func(format string, args ...any)
	mem   *memory
	kept  map[Hash]keptBlock
	known map[uint64]bool // by Seq; false: ended
	open  []tierTask      // by ticket
	epoch int             // of the last reset
}

type keptBlock struct {
	values []uint64
	epoch  int
}

// tierTask is something that the tier has been asked and has not answered.
type tierTask struct {
	ticket uint64
	verb   string // look, load, store
	keys   []Hash
	blocks []kv.BlockID
	values [][]uint64 // of a store: what its blocks held when it began
	epoch  int        // of the prefix cache when it began
}

func newFakeTier(fatal func(string, ...any), mem *memory) *fakeTier {
	return &fakeTier{fatal: fatal, mem: mem, kept: map[Hash]keptBlock{}, known: map[uint64]bool{}}
}

// take carries out an action.
func (f *fakeTier) take(a Action, epoch int) {
	live := func(seq uint64) {
		if !f.known[seq] {
			f.fatal("%#v of a request that the tier does not know", a)
		}
	}
	switch a := a.(type) {
	case TierBegin:
		if _, twice := f.known[a.Seq]; twice {
			f.fatal("%v begins twice", a)
		}
		f.known[a.Seq] = true
	case TierLook:
		live(a.Seq)
		f.open = append(f.open, tierTask{ticket: a.Ticket, verb: "look", keys: a.Keys})
	case TierForget:
		live(a.Seq)
	case TierLoad:
		live(a.Seq)
		f.scribble(a.Blocks, a.Ticket)
		f.open = append(f.open, tierTask{ticket: a.Ticket, verb: "load", keys: a.Keys, blocks: a.Blocks, epoch: epoch})
	case TierStore:
		live(a.Seq)
		f.open = append(f.open, tierTask{ticket: a.Ticket, verb: "store", keys: a.Keys, blocks: a.Blocks, values: f.contents(a.Blocks), epoch: epoch})
	case TierEnd:
		live(a.Seq)
		f.known[a.Seq] = false
	case TierReset:
		clear(f.kept)
		f.epoch++
	}
}

func (f *fakeTier) contents(blocks []kv.BlockID) [][]uint64 {
	var out [][]uint64
	for _, b := range blocks {
		out = append(out, f.mem.read([]kv.BlockID{b}, f.mem.blockSize))
	}
	return out
}

// scribble is a copy under way: until it is over the blocks hold anything.
func (f *fakeTier) scribble(blocks []kv.BlockID, garbage uint64) {
	for _, b := range blocks {
		for i := range f.mem.blockSize {
			garbage = mix(garbage, uint64(i))
			*f.mem.at([]kv.BlockID{b}, i) = garbage
		}
	}
}

// has is how many of the first keys are kept.
func (f *fakeTier) has(keys []Hash) int {
	for i, k := range keys {
		if _, ok := f.kept[k]; !ok {
			return i
		}
	}
	return len(keys)
}

// answer ends a task; a load brings at most n blocks, a store keeps its blocks if n is positive.
func (f *fakeTier) answer(task tierTask, n int) Event {
	f.open = slices.DeleteFunc(f.open, func(o tierTask) bool { return o.ticket == task.ticket })
	n = min(n, f.has(task.keys))
	switch task.verb {
	case "look":
		return TierFound{Ticket: task.ticket, Blocks: n}
	case "load":
		f.scribble(task.blocks, task.ticket+1)
		for i := range n {
			k := f.kept[task.keys[i]]
			f.mem.write(task.blocks[i:i+1], 0, k.values)
			f.mem.stamp(task.blocks[i:i+1], 0, f.mem.blockSize, k.epoch)
		}
		return TierLoaded{Ticket: task.ticket, Blocks: n}
	}
	return f.store(task)
}

// store keeps blocks, which must be what they were when the store began.
func (f *fakeTier) store(task tierTask) Event {
	for i, now := range f.contents(task.blocks) {
		if !slices.Equal(now, task.values[i]) {
			f.fatal("block %d has changed while it was stored", task.blocks[i])
		}
		old, known := f.kept[task.keys[i]]
		if known && !slices.Equal(old.values, now) {
			f.fatal("one hash for two contents")
		}
		if !known && task.epoch == f.epoch { // else forgotten before it was there
			f.kept[task.keys[i]] = keptBlock{now, task.epoch}
		}
	}
	return TierStored{Ticket: task.ticket}
}

func (f *fakeTier) checkQuiet() {
	if len(f.open) > 0 {
		f.fatal("still open: %v", f.open)
	}
	for seq, live := range f.known {
		if live {
			f.fatal("the tier was not told the end of request %d", seq)
		}
	}
}

// answerTierOne answers one of the open tasks.
func (w *world) answerTierOne(t *rapid.T) {
	task := rapid.SampledFrom(w.tier.open).Draw(t, "task")
	n := len(task.keys)
	if rapid.IntRange(0, 3).Draw(t, "short") == 0 {
		n = rapid.IntRange(0, n).Draw(t, "n")
	}
	w.tierStep(task, n)
}

// tierStep answers a task. A request whose load ends goes on behind what it has brought.
func (w *world) tierStep(task tierTask, n int) {
	if c := w.m.tier.copies[task.ticket]; task.verb == "load" && c.r.state == loading {
		if r := w.reqs[c.r.ID]; r != nil {
			r.epoch, r.next, r.lost = task.epoch, (c.from+min(n, w.tier.has(task.keys)))*w.cfg.BlockSize, w.lost(r.ID)
		}
	}
	w.step(w.tier.answer(task, n))
}

// answerTier answers all open tasks.
func (w *world) answerTier(n func(int) int) {
	for len(w.tier.open) > 0 {
		w.tierStep(w.tier.open[0], n(len(w.tier.open[0].keys)))
	}
}

func describeTier(a Action) (string, bool) {
	switch a := a.(type) {
	case TierBegin:
		return fmt.Sprintf("tier begin %s", a.ID), true
	case TierLook:
		return fmt.Sprintf("tier look %d: %d keys", a.Ticket, len(a.Keys)), true
	case TierForget:
		return fmt.Sprintf("tier forget %d", a.Ticket), true
	case TierLoad:
		return fmt.Sprintf("tier load %d into %v", a.Ticket, a.Blocks), true
	case TierStore:
		return fmt.Sprintf("tier store %d of %v", a.Ticket, a.Blocks), true
	case TierEnd:
		return "tier end", true
	case TierReset:
		return "tier reset", true
	}
	return "", false
}
