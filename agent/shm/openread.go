package shm

import (
	"fmt"

	"github.com/kvferry/kvferry/agent"
)

// openRead answers a READ whose grant and ranges are right: the poster copies.
func (c *conn) openRead(j *incoming) {
	var segs []*segment
	for _, p := range j.pieces {
		for at, end := p.src, p.src+p.n; at < end; {
			s := c.a.pool.find(at)
			if s == nil {
				c.stageRead(j)
				return
			}
			if k := len(segs); k == 0 || segs[k-1] != s {
				segs = append(segs, s)
			}
			at = s.end
		}
	}
	slot, word, ok := c.a.leases.word(j.grantID, j.grant)
	if !ok {
		j.refuse(errRevokedIn)
		return
	}
	c.push(&readable{readableFrame: readableFrame{transfer: j.transfer, slot: slot, word: word}, segs: segs})
	j.release()
}

// readable is the answer to a READ, behind the memory that it names.
type readable struct {
	readableFrame
	segs []*segment
}

// send is outgoing.send.
func (r *readable) send(w *writer) error {
	for _, s := range r.segs {
		told, err := w.ensure(s)
		if err != nil {
			return err
		}
		if !told {
			return w.put(appendRefused(nil, r.transfer, "the memory was freed"))
		}
	}
	return w.put(r.append(nil))
}

// stageRead begins to copy a READ's source out of borrowed memory, for the poster to map.
func (c *conn) stageRead(j *incoming) {
	c.jobs.Lock()
	ok := j.bytes <= maxStaged-c.jobs.bytes
	if ok {
		c.jobs.bytes += j.bytes
	}
	c.jobs.Unlock()
	if !ok {
		j.refuse(fmt.Errorf("reads out of borrowed memory are limited to %d bytes at a time", maxStaged))
		return
	}
	c.a.workers.submit(&c.lane, &stageRead{in: j})
}

// stageRead is the job of it.
type stageRead struct {
	in   *incoming
	to   *segment
	done uint64
}

func (s *stageRead) wide() bool { return false }

// step is job.step.
func (s *stageRead) step(spans *[]span) (int, verdict) {
	cost, done, err := s.slice(spans)
	if err == nil && !done {
		return cost, more
	}
	if err == nil {
		err = s.answer()
	}
	if err != nil {
		s.refuse(err)
	}
	return cost, over
}

// slice copies one slice inside the grant's gate.
func (s *stageRead) slice(spans *[]span) (cost int, done bool, err error) {
	j := s.in
	if j.c.dead() {
		return 0, false, errWithdrawn
	}
	if s.to == nil {
		if s.to, err = j.c.a.pool.make(int(j.bytes)); err != nil {
			return 0, false, err
		}
	}
	cost, done = j.slice(spans)
	for i := range *spans {
		(*spans)[i].dst = s.to.addr + s.done
		s.done += (*spans)[i].n
	}
	if !j.grant.Enter() {
		return cost, false, errRevokedIn
	}
	defer j.grant.Leave()
	return cost, done, copySpans(*spans)
}

// answer tells the poster where it may read.
func (s *stageRead) answer() error {
	j := s.in
	slot, word, ok := j.c.a.leases.word(j.grantID, j.grant)
	if !ok {
		return errRevokedIn
	}
	if !j.c.keepStaged(j.transfer, s.to) {
		return errWithdrawn
	}
	j.c.push(&readable{
		readableFrame: readableFrame{transfer: j.transfer, slot: slot, word: word, staged: s.to.addr},
		segs:          []*segment{s.to},
	})
	j.release()
	return nil
}

func (s *stageRead) refuse(err error) {
	if s.to != nil {
		_ = s.to.free()
	}
	s.in.c.jobs.Lock()
	s.in.c.jobs.bytes -= s.in.bytes
	s.in.c.jobs.Unlock()
	s.in.refuse(err)
}

// keepStaged keeps a READ's staged memory until the poster is done with it, or gone.
func (c *conn) keepStaged(id agent.TransferID, s *segment) bool {
	c.jobs.Lock()
	defer c.jobs.Unlock()
	if c.jobs.ended || c.jobs.staged[id] != nil {
		return false
	}
	c.jobs.staged[id] = s
	return true
}

func (c *conn) dropStaged(id agent.TransferID) {
	c.jobs.Lock()
	s := c.jobs.staged[id]
	delete(c.jobs.staged, id)
	if s != nil {
		c.jobs.bytes -= s.end - s.addr
	}
	c.jobs.Unlock()
	if s != nil {
		_ = s.free()
		c.forget(s.id)
	}
}

// releaseStaged frees the staged memory of all READs. The connection has ended.
func (c *conn) releaseStaged() {
	c.jobs.Lock()
	defer c.jobs.Unlock()
	c.jobs.ended = true
	for _, s := range c.jobs.staged {
		_ = s.free()
	}
	c.jobs.staged = nil
}
