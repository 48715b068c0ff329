package tier

import "github.com/kvferry/kvferry/tier/core"

// Fault is a way to damage a stored block, for Config.InjectFault.
type Fault string

const (
	FlipBit   Fault = "flip-bit"   // one bit in the middle of the block
	ZeroBlock Fault = "zero-block" // all of it is zero; a block that was zero gets a one
	TornBlock Fault = "torn-block" // its second half is the first half again, or a flipped bit if that is equal
)

// Faults is every known fault.
var Faults = []Fault{FlipBit, ZeroBlock, TornBlock}

// apply changes at least one bit of a block that is not empty.
func (f Fault) apply(b []byte) {
	before := core.SumOf(b)
	switch f {
	case ZeroBlock:
		clear(b)
	case TornBlock:
		copy(b[len(b)/2:], b[:len(b)/2])
	}
	if core.SumOf(b) == before {
		b[len(b)/2] ^= 1
	}
}

// inject damages the blocks of a reservation that is about to be committed; nobody else may read them.
func (t *Manager) inject(slots []core.Slot) {
	turn := t.cfg.InjectFault
	if len(turn) == 0 || len(slots) == 0 {
		return
	}
	t.mu.Lock()
	first := t.mu.faults
	t.mu.faults += uint64(len(slots))
	t.mu.Unlock()
	for i, s := range slots {
		turn[(first+uint64(i))%uint64(len(turn))].apply(t.Block(s))
	}
}

// Injected is how many blocks InjectFault has damaged.
func (t *Manager) Injected() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.faults
}
