package shm

import "github.com/kvferry/kvferry/agent/internal/front"

// stageJob copies the source of a WRITE out of borrowed memory into memory that the peer can map.
// It is not wide.
type stageJob struct {
	t    *transfer
	to   *segment
	done uint64
	cut  *front.Cutter
	next []front.Piece
}

func (j *stageJob) wide() bool { return false }

// step is job.step.
func (j *stageJob) step(spans *[]span) (int, verdict) {
	if j.cut == nil && !j.begin() {
		return 0, over
	}
	if !j.t.gate.Enter() {
		return 0, over
	}
	list, cost := (*spans)[:0], 0
	for _, p := range j.next {
		list = append(list, span{dst: j.to.addr + j.done, src: p.Local, n: uint64(p.N)})
		j.done += uint64(p.N)
		cost += p.N + spanCost
	}
	*spans = list
	err := copySpans(list)
	j.t.gate.Leave()
	if err != nil {
		j.t.fail(err)
		return cost, over
	}
	j.t.c.progress.Store(j.t.a.now())
	if j.next = j.cut.Next(j.next); len(j.next) > 0 {
		return cost, more
	}
	j.t.c.push(j.t)
	return cost, over
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
