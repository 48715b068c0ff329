package shm

import (
	"errors"
	"sync/atomic"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
)

var errNotTold = errors.New("the peer has not shared the memory that is to be read")

// readJob copies a READ out of the peer's memory. It belongs to the worker that runs it.
type readJob struct {
	t      *transfer
	watch  watch
	from   sources
	staged uint64 // where the peer has put the pieces one behind the other; 0: each in its place
	done   uint64

	cut   *front.Cutter
	next  []front.Piece
	spans []span
	fence atomic.Uint32
}

// locate finds the mappings that the READ needs, and holds them. It runs in the reader.
func (j *readJob) locate(maps *mappings) error {
	if j.staged != 0 {
		m := maps.find(j.staged, uint64(j.t.plan.Bytes))
		if m == nil {
			return errNotTold
		}
		j.from.add(m)
		return nil
	}
	for d := range j.t.plan.RemoteRanges {
		m := maps.find(d.Addr, d.Length)
		if m == nil {
			j.from.drop()
			return errNotTold
		}
		j.from.add(m)
	}
	return nil
}

// step is job.step.
func (j *readJob) step() (int, bool) {
	if j.cut == nil {
		j.cut = j.t.plan.Cut(sliceBytes, slicePieces)
		j.next = j.cut.Next(nil)
	}
	if !j.t.gate.Enter() {
		return 0, j.over()
	}
	if !j.watch.holds() {
		j.t.gate.Leave()
		return 0, j.fail(errRevoked)
	}
	j.t.touch()
	n := j.locateSlice()
	err := copySpans(j.spans)
	j.next = j.cut.Next(j.next)
	whole := err == nil && len(j.next) == 0
	torn := whole && !j.watch.held(&j.fence)
	j.t.gate.Leave()
	j.t.c.progress.Store(j.t.a.now())
	switch {
	case err != nil:
		return n, j.fail(err)
	case torn:
		return n, j.fail(errRevoked)
	case whole:
		j.t.end(agent.OutcomeDone, nil)
		return n, j.over()
	}
	return n, false
}

// locateSlice fills spans with the next slice, and gives its cost.
func (j *readJob) locateSlice() int {
	j.spans = j.spans[:0]
	cost := 0
	for _, p := range j.next {
		at, n, dst := p.Remote, uint64(p.N), p.Local
		if j.staged != 0 {
			at = j.staged + j.done
		}
		j.done += n
		cost += p.N + spanCost
		for n > 0 {
			m := j.source(at)
			k := min(n, m.end-at)
			j.spans = append(j.spans, span{dst: dst, src: m.at(at), n: k})
			at, n, dst = at+k, n-k, dst+k
		}
	}
	return cost
}

// source is the held mapping that contains an address; locate has made sure that there is one.
func (j *readJob) source(at uint64) *mapping {
	for i, m := range j.from {
		if at >= m.addr && at < m.end {
			j.from[0], j.from[i] = m, j.from[0]
			return m
		}
	}
	panic("a piece of a READ outside of what was located")
}

func (j *readJob) fail(err error) bool {
	j.t.fail(err)
	return j.over()
}

// over releases what the job holds.
func (j *readJob) over() bool {
	j.from.drop()
	j.watch.page.drop()
	if j.staged != 0 {
		j.t.c.push(raw(appendTransfer(nil, kindReadEnd, j.t.id)))
	}
	return true
}

// stageJob copies the source of a WRITE out of borrowed memory into memory that the peer can map.
type stageJob struct {
	t     *transfer
	to    *segment
	done  uint64
	cut   *front.Cutter
	next  []front.Piece
	spans []span
}

// step is job.step.
func (j *stageJob) step() (int, bool) {
	if j.cut == nil && !j.begin() {
		return 0, true
	}
	if !j.t.gate.Enter() {
		return 0, true
	}
	j.spans = j.spans[:0]
	n := 0
	for _, p := range j.next {
		j.spans = append(j.spans, span{dst: j.to.addr + j.done, src: p.Local, n: uint64(p.N)})
		j.done += uint64(p.N)
		n += p.N + spanCost
	}
	err := copySpans(j.spans)
	j.t.gate.Leave()
	if err != nil {
		j.t.fail(err)
		return n, true
	}
	if j.next = j.cut.Next(j.next); len(j.next) > 0 {
		return n, false
	}
	j.t.c.progress.Store(j.t.a.now())
	j.t.c.push(j.t)
	return n, true
}

// begin makes the memory, unless the transfer has ended.
func (j *stageJob) begin() bool {
	to, err := j.t.a.pool.make(int(j.t.plan.Bytes))
	if err != nil {
		j.t.fail(err)
		return false
	}
	j.t.a.mu.Lock()
	defer j.t.a.mu.Unlock()
	if j.t.stopped {
		_ = to.free()
		return false
	}
	j.to, j.t.staged = to, to
	j.cut = j.t.plan.Cut(sliceBytes, slicePieces)
	j.next = j.cut.Next(nil)
	return true
}
