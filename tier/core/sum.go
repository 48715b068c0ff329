package core

import "hash/crc32"

// Sum is the CRC32C of a block's content, if it is known.
type Sum struct {
	CRC   uint32
	Known bool
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// SumOf reads a block.
func SumOf(content []byte) Sum { return Sum{CRC: crc32.Checksum(content, castagnoli), Known: true} }

// SetSums says what the blocks of a reservation, or of a load, hold: before Commit or LoadEnded, in the
// order of their slots. The sums stay with the blocks: jobs and answers to peers have them.
func (m *Machine) SetSums(id JobID, sums []Sum) {
	j := m.jobs[id]
	if j == nil || j.kind != jobReserve && j.kind != jobLoad {
		return
	}
	for i, b := range j.blocks {
		if i < len(sums) {
			b.sum = sums[i]
		}
	}
}

// Blocks gives the slots of a job or lease, and what is known of their content; nil for an unknown id.
func (m *Machine) Blocks(id JobID) (slots []Slot, sums []Sum) {
	if j := m.jobs[id]; j != nil {
		for _, b := range j.blocks {
			slots, sums = append(slots, b.slot), append(sums, b.sum)
		}
	}
	return slots, sums
}

// Forget drops blocks that turned out to be damaged. Who reads one goes on reading it.
func (m *Machine) Forget(keys []Key) {
	for _, k := range keys {
		if b := m.pool.index[k]; b != nil && b.state == ready {
			m.pool.forget(b)
			m.stats.Damaged++
			m.changed = true
		}
	}
}
