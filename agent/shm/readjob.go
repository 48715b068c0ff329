package shm

import (
	"errors"
	"sync/atomic"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
)

var errNotTold = errors.New("the peer has not shared the memory that is to be read")

// readJob copies a READ out of the peer's memory. Workers share it.
type readJob struct {
	t      *transfer
	watch  watch
	from   sources // written by locate only
	staged uint64  // where the peer has put the pieces one behind the other; 0: each in its place
	fence  atomic.Uint32

	share share
	// Guarded by share.
	done uint64
	cut  *front.Cutter
	next []front.Piece
	last *mapping
}

// locate finds the mappings that the READ needs, and holds them. It runs in the reader.
func (j *readJob) locate(maps *mappings) error {
	if j.staged != 0 {
		m := maps.find(j.staged, uint64(j.t.plan.Bytes))
		if m == nil {
			return errNotTold
		}
		j.from.add(m)
	} else {
		for d := range j.t.plan.RemoteRanges {
			if !j.locateRange(maps, d.Addr, d.Addr+d.Length) {
				j.from.drop()
				return errNotTold
			}
		}
	}
	j.cut = j.t.plan.Cut(sliceBytes, slicePieces)
	j.next = j.cut.Next(nil)
	return nil
}

// locateRange finds the mappings of one range, which neighbours may share.
func (j *readJob) locateRange(maps *mappings, at, end uint64) bool {
	for at < end {
		m := maps.find(at, 1)
		if m == nil {
			return false
		}
		j.from.add(m)
		at = m.end
	}
	return true
}

func (j *readJob) wide() bool { return j.t.plan.Bytes > 2*quantumBytes }

// step is job.step.
func (j *readJob) step(spans *[]span) (int, verdict) {
	cost, ok := j.share.claim(func() (int, bool) { return j.slice(spans) })
	if !ok {
		return 0, busy
	}
	last, err := j.copy(*spans)
	if !last {
		return cost, j.share.verdict()
	}
	switch {
	case errors.Is(err, errOver):
	case err != nil:
		j.t.fail(err)
	default:
		j.t.end(agent.OutcomeDone, nil)
	}
	j.release()
	return cost, over
}

// copy copies one slice, unless the transfer or the grant is over; the last one looks whether the
// grant stood all the time.
func (j *readJob) copy(spans []span) (last bool, err error) {
	if !j.t.gate.Enter() {
		return j.share.landed(errOver)
	}
	defer j.t.gate.Leave()
	if !j.watch.holds() {
		return j.share.landed(errRevoked)
	}
	j.t.touch()
	err = copySpans(spans)
	j.t.c.progress.Store(j.t.a.now())
	last, err = j.share.landed(err)
	if last && err == nil && !j.watch.held(&j.fence) {
		err = errRevoked
	}
	return last, err
}

// slice fills spans with the next slice, and gives its cost and whether it is the last.
func (j *readJob) slice(spans *[]span) (int, bool) {
	list := (*spans)[:0]
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
			list = append(list, span{dst: dst, src: m.at(at), n: k})
			at, n, dst = at+k, n-k, dst+k
		}
	}
	*spans = list
	j.next = j.cut.Next(j.next)
	return cost, len(j.next) == 0
}

// source is the held mapping that contains an address; locate has made sure that there is one.
func (j *readJob) source(at uint64) *mapping {
	if m := j.last; m != nil && at >= m.addr && at < m.end {
		return m
	}
	for _, m := range j.from {
		if at >= m.addr && at < m.end {
			j.last = m
			return m
		}
	}
	panic("a piece of a READ outside of what was located")
}

// release ends what the job holds.
func (j *readJob) release() {
	j.from.drop()
	j.watch.page.drop()
	if j.staged != 0 {
		j.t.c.push(raw(appendTransfer(nil, kindReadEnd, j.t.id)))
	}
}
