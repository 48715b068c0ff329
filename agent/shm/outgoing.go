package shm

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
	"github.com/kvferry/kvferry/agent/internal/gate"
)

var (
	errSilence   = errors.New("no progress within the bound of silence")
	errCancelled = errors.New("cancelled")
	errRevoked   = errors.New("refused by the peer: the grant was revoked during the transfer")
)

// transfer is one that we posted.
type transfer struct {
	a      *Agent
	c      *conn
	id     agent.TransferID
	plan   *front.Plan
	posted time.Time
	began  int64        // posted, on the agent's clock
	first  atomic.Int64 // nanoseconds after posted when its first byte was handed on; 0 before
	over   atomic.Bool  // it has its Result

	gate gate.Gate // of our own copying: READs, and staging

	slot uint32 // of its word, and the word; a WRITE's only
	word uint64

	// Guarded by a.mu.
	stopped bool
	staged  *segment // what the peer copies from instead of borrowed memory
	timer   *time.Timer
}

// Post is Agent.Post.
func (a *Agent) Post(tr agent.Transfer) (agent.TransferID, error) {
	posted := time.Now()
	if a.front.Closed() {
		return 0, agent.ErrClosed
	}
	plan, err := a.front.Check(tr)
	if err != nil {
		return 0, err
	}
	stage := tr.Op == agent.Write && a.borrowed.Load() && a.unmappable(plan)
	if stage && plan.Bytes > maxStaged {
		plan.Release()
		return 0, &agent.LimitError{What: "bytes of a transfer out of borrowed memory", Got: int(plan.Bytes), Limit: maxStaged}
	}
	t := &transfer{a: a, plan: plan, posted: posted, began: int64(posted.Sub(a.born))}
	if err := a.enter(t); err != nil {
		plan.Release()
		return 0, err
	}
	if stage {
		a.workers.submit(&t.c.lane, &stageJob{t: t})
	} else {
		t.c.push(t)
	}
	return t.id, nil
}

// enter puts a transfer into the tables.
func (a *Agent) enter(t *transfer) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.mu.peers[t.plan.Peer.Name]
	switch {
	case a.mu.closed:
		return agent.ErrClosed
	case c == nil || c.id != t.plan.Peer:
		return &agent.PostError{Op: t.plan.Op, Reason: "peer " + string(t.plan.Peer.Name) + " is gone"}
	case !a.front.Events.Reserve():
		return agent.ErrBusy
	}
	if t.plan.Op == agent.Write {
		var ok bool
		if t.slot, t.word, ok = a.control.begin(); !ok {
			a.front.Events.Unreserve()
			return agent.ErrBusy
		}
	}
	a.mu.lastTransfer++
	t.id, t.c = a.mu.lastTransfer, c
	a.mu.transfers[t.id] = t
	c.transfers[t] = struct{}{}
	t.timer = time.AfterFunc(t.plan.Silence, t.expire)
	return nil
}

// unmappable reports whether some local byte of a plan lies in memory that peers cannot map.
func (a *Agent) unmappable(p *front.Plan) bool {
	cut := p.Cut(math.MaxInt, framePieces)
	for buf := cut.Next(nil); len(buf) > 0; buf = cut.Next(buf) {
		for _, piece := range buf {
			for at, end := piece.Local, piece.Local+uint64(piece.N); at < end; {
				s := a.pool.find(at)
				if s == nil {
					return true
				}
				at = s.end
			}
		}
	}
	return false
}

// Cancel is Agent.Cancel.
func (a *Agent) Cancel(id agent.TransferID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if t := a.mu.transfers[id]; t != nil && !t.over.Load() {
		t.finish(agent.OutcomeCancelled, t.c.peerError("transfer", errCancelled))
	}
}

// expire is the transfer's timer: its bound of silence, or that of the peer's word after a Cancel.
func (t *transfer) expire() {
	a := t.a
	a.mu.Lock()
	defer a.mu.Unlock()
	if t.stopped {
		return
	}
	if t.over.Load() {
		t.stop()
		return
	}
	quiet := time.Duration(a.now() - max(t.began, t.c.progress.Load()))
	if left := t.plan.Silence - quiet; left > 0 {
		t.timer.Reset(left)
		return
	}
	t.finish(agent.OutcomeDeadline, t.c.peerError("transfer", errSilence))
}

// finish gives the Result, and the Stopped unless the peer is asked first. The caller holds a.mu;
// a transfer that has its Result already is left alone.
func (t *transfer) finish(outcome agent.Outcome, err error) {
	if t.over.Load() {
		// It waits for the word of a peer that is now gone, or that has now come.
		if outcome != agent.OutcomeCancelled {
			t.stop()
		}
		return
	}
	if t.plan.Op == agent.Write {
		t.a.control.end(t.slot)
	}
	t.over.Store(true)
	took := time.Since(t.posted)
	r := agent.Result{
		Transfer: t.id, Peer: t.c.id, Outcome: outcome, Err: err, Descs: t.plan.Descs(), Took: took,
		Post: min(time.Duration(t.first.Load()), took),
	}
	if outcome == agent.OutcomeDone {
		r.Bytes = t.plan.Bytes
	}
	t.a.front.Events.Result(r)
	ask := t.plan.Op == agent.Write && (outcome == agent.OutcomeCancelled || outcome == agent.OutcomeDeadline)
	if ask && !t.c.out.remove(t) {
		t.c.push(raw(appendTransfer(nil, kindCancel, t.id)))
		if outcome == agent.OutcomeCancelled {
			t.timer.Reset(min(t.plan.Silence, stopGrace))
			return
		}
	}
	t.stop()
}

// stop gives the Stopped. The caller holds a.mu.
func (t *transfer) stop() {
	if t.stopped {
		return
	}
	t.stopped = true
	t.timer.Stop()
	t.c.out.remove(t)
	t.gate.Shut()
	if t.plan.Op == agent.Write {
		t.a.control.put(t.slot)
	}
	if t.staged != nil {
		_ = t.staged.free()
		t.c.forget(t.staged.id)
	}
	delete(t.a.mu.transfers, t.id)
	delete(t.c.transfers, t)
	t.plan.Release()
	t.a.front.Events.Stopped(agent.Stopped{Transfer: t.id, Peer: t.c.id})
}

// end is finish from a goroutine that does not hold a.mu. A READ's notification is sent with it.
func (t *transfer) end(outcome agent.Outcome, err error) {
	t.a.mu.Lock()
	defer t.a.mu.Unlock()
	if outcome == agent.OutcomeDone && !t.over.Load() && t.plan.Op == agent.Read && t.plan.Notif != nil {
		_ = t.c.notify(t.plan.Notif) // if it cannot be sent, the peer is lost
	}
	t.finish(outcome, err)
}

func (t *transfer) fail(err error) { t.end(agent.OutcomeFailed, t.c.peerError("transfer", err)) }

// touch notes that its first byte is handed on.
func (t *transfer) touch() {
	if t.first.Load() == 0 {
		t.first.Store(max(int64(time.Since(t.posted)), 1))
	}
}

// send encodes the transfer in the connection's writer.
func (t *transfer) send(w *writer) error {
	if t.over.Load() {
		return nil
	}
	t.touch()
	var err error
	if t.plan.Op == agent.Write {
		err = w.put(writeFrame{
			transfer: t.id, slot: t.slot, word: t.word, silence: uint64(t.plan.Silence),
			bytes: uint64(t.plan.Bytes), grant: t.plan.Grant, notif: t.plan.Notif,
		}.append(nil))
	} else {
		err = w.put(readFrame{transfer: t.id, bytes: uint64(t.plan.Bytes), grant: t.plan.Grant}.append(nil))
	}
	if err != nil {
		return err
	}
	return t.sendPieces(w)
}

// sendPieces sends the list of pieces, and what memory they lie in.
func (t *transfer) sendPieces(w *writer) error {
	enc := encoder{t: t, w: w}
	cut := t.plan.Cut(math.MaxInt, framePieces)
	for buf := cut.Next(nil); len(buf) > 0; buf = cut.Next(buf) {
		for _, p := range buf {
			if err := enc.piece(p); errors.Is(err, errOver) {
				return w.put(appendTransfer(nil, kindCancel, t.id))
			} else if err != nil {
				return err
			}
		}
	}
	return enc.flush(true)
}

// encoder packs pieces into frames.
type encoder struct {
	t    *transfer
	w    *writer
	seg  *segment // of the latest piece
	n    int      // pieces in body
	body []byte
	done uint64 // bytes already encoded, which are the offset in staged memory
}

// errOver tells that the transfer ended while it was being encoded.
var errOver = errors.New("the transfer is over")

// piece adds one piece, cut where local memory changes.
func (e *encoder) piece(p front.Piece) error {
	for n := uint64(p.N); n > 0; {
		src, k, err := e.source(p, n)
		if err != nil {
			return err
		}
		dst := p.Remote
		if e.t.plan.Op == agent.Read {
			dst = 0
		}
		if e.n == framePieces {
			if err := e.flush(false); err != nil {
				return err
			}
		}
		e.body = appendPiece(e.body, wirePiece{src: src, dst: dst, n: k})
		e.n++
		e.done += k
		n -= k
		p.Local += k
		p.Remote += k
	}
	return nil
}

// source is where the next bytes of a piece come from, in the owner's addresses, and how many of
// its n remaining ones lie there.
func (e *encoder) source(p front.Piece, n uint64) (src, k uint64, err error) {
	if e.t.plan.Op == agent.Read {
		return p.Remote, n, nil
	}
	src = p.Local
	if e.t.staged != nil {
		src = e.t.staged.addr + e.done
	}
	if e.seg == nil || src < e.seg.addr || src >= e.seg.end {
		if e.seg = e.t.staged; e.seg == nil {
			e.seg = e.t.a.pool.find(src)
		}
		if e.seg == nil {
			return 0, 0, errOver // freed meanwhile
		}
		told, err := e.w.ensure(e.seg)
		if err != nil {
			return 0, 0, err
		}
		if !told {
			return 0, 0, errOver
		}
	}
	return src, min(n, e.seg.end-src), nil
}

// flush sends what is packed. A transfer that is over goes no further.
func (e *encoder) flush(last bool) error {
	if !last && e.t.over.Load() {
		return errOver
	}
	head := frame(make([]byte, 0, headerBytes+1), kindPieces, 1+len(e.body))
	if last {
		head = append(head, 1)
	} else {
		head = append(head, 0)
	}
	if err := e.w.put(head); err != nil {
		return err
	}
	err := e.w.put(e.body)
	e.body, e.n = e.body[:0], 0
	return err
}

// fromGiver handles a frame of a peer that we added. It runs in the reader.
func (c *conn) fromGiver(k kind, body []byte) error {
	switch k {
	case kindDone:
		id, err := decodeTransfer(body)
		if err != nil {
			return err
		}
		return c.answered(id, agent.Write, func(t *transfer) { t.end(agent.OutcomeDone, nil) })
	case kindRefused:
		id, text, err := decodeRefused(body)
		if err != nil {
			return err
		}
		if t := c.find(id); t != nil {
			c.progress.Store(c.a.now())
			t.fail(fmt.Errorf("refused by the peer: %q", text))
		}
		return nil
	case kindProgress:
		if len(body) != 0 {
			return errMalformed
		}
		c.progress.Store(c.a.now())
		return nil
	case kindReadable:
		r, err := decodeReadable(body)
		if err != nil {
			return err
		}
		return c.readable(r)
	}
	return c.both(k, body)
}

// find is a transfer of this connection that has not stopped, or nil.
func (c *conn) find(id agent.TransferID) *transfer {
	c.a.mu.Lock()
	defer c.a.mu.Unlock()
	if t := c.a.mu.transfers[id]; t != nil && t.c == c {
		return t
	}
	return nil
}

// answered handles the good end of a transfer. One that has stopped meanwhile is not known any
// more.
func (c *conn) answered(id agent.TransferID, op agent.Op, f func(*transfer)) error {
	t := c.find(id)
	if t == nil {
		return nil
	}
	if t.plan.Op != op {
		return fmt.Errorf("transfer %d is answered as what it is not", id)
	}
	c.progress.Store(c.a.now())
	f(t)
	return nil
}

// readable starts the copying of a READ.
func (c *conn) readable(r readableFrame) error {
	watch, ok := watchWord(c.page, r.slot, r.word)
	if !ok {
		return fmt.Errorf("word %d is beyond the control page", r.slot)
	}
	t := c.find(r.transfer)
	if t == nil {
		if r.staged != 0 {
			c.push(raw(appendTransfer(nil, kindReadEnd, r.transfer)))
		}
		return nil
	}
	if t.plan.Op != agent.Read {
		return fmt.Errorf("transfer %d is answered as what it is not", r.transfer)
	}
	c.progress.Store(c.a.now())
	j := &readJob{t: t, watch: watch, staged: r.staged}
	if err := j.locate(c.maps); err != nil {
		t.fail(err)
		return nil
	}
	c.page.hold()
	c.a.workers.submit(&c.lane, j)
	return nil
}
