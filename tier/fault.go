package tier

import "github.com/kvferry/kvferry/tier/core"

// Fault is a way to damage a stored block, for Config.InjectFault.
type Fault string

const (
	FlipBit   Fault = "flip-bit"   // one bit in the middle of the block
	ZeroBlock Fault = "zero-block" // all of it is zero; a block that was zero gets a one
	TornBlock Fault = "torn-block" // its second half is the first half again, or a flipped bit if that is equal
)

// Unseen zeroes a block before its checksum is taken, which then belongs to the damage: what would happen
// without checksums. It is for proving that whoever compares results sees damage at all.
const Unseen Fault = "unseen"

// Faults is every fault that a checksum must catch.
var Faults = []Fault{FlipBit, ZeroBlock, TornBlock}

// apply changes at least one bit of a block that is not empty.
func (f Fault) apply(b []byte) {
	before := core.SumOf(b)
	switch f {
	case ZeroBlock, Unseen:
		clear(b)
	case TornBlock:
		copy(b[len(b)/2:], b[:len(b)/2])
	}
	if core.SumOf(b) == before {
		b[len(b)/2] ^= 1
	}
}

// faultsOf is the next faults in turn, one for each of n blocks; none without Config.InjectFault.
func (t *Manager) faultsOf(n int) []Fault {
	turn := t.cfg.InjectFault
	if len(turn) == 0 || n == 0 {
		return nil
	}
	t.mu.Lock()
	first := t.mu.faults
	t.mu.faults += uint64(n)
	t.mu.Unlock()
	out := make([]Fault, n)
	for i := range out {
		out[i] = turn[(first+uint64(i))%uint64(len(turn))]
	}
	return out
}

// inject damages blocks of a reservation that is about to be committed, those whose fault comes before
// the checksum or those whose comes after. Nobody else may read them yet.
func (t *Manager) inject(slots []core.Slot, faults []Fault, before bool) {
	for i, f := range faults {
		if (f == Unseen) == before {
			f.apply(t.Block(slots[i]))
		}
	}
}

// Injected is how many blocks InjectFault has damaged.
func (t *Manager) Injected() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.faults
}
