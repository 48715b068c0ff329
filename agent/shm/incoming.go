package shm

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
	"github.com/kvferry/kvferry/agent/internal/grants"
)

var (
	errOutside   = errors.New("a range lies outside of the grant")
	errRevokedIn = errors.New("the grant was revoked during the transfer")
	errWithdrawn = errors.New("its poster does not want it any more")
	errForeign   = errors.New("the source does not lie in memory that was shared")
	errUnknown   = errors.New("no such transfer")
)

// States of an incoming transfer, between the reader, which may withdraw it, and the worker.
const (
	waiting int32 = iota
	running
	withdrawn
)

// incoming is a transfer that a peer has posted to us: a WRITE into our memory, or the request of a
// READ. The reader fills it, then the workers share it.
type incoming struct {
	c        *conn
	transfer agent.TransferID
	read     bool
	grantID  agent.GrantID
	grant    *grants.Grant
	bytes    uint64
	refused  error // known while its pieces are still coming

	watch   watch // the poster's word
	notif   []byte
	silence time.Duration
	pieces  []span // a WRITE's in addresses of ours; a READ's have no dst, and src is in our memory
	sum     uint64
	from    sources
	cost    int

	state atomic.Int32

	share share
	fence atomic.Uint32
	// Guarded by share.
	at    int    // piece
	off   uint64 // bytes of it that are claimed
	began time.Time
	told  time.Time
}

// fromPoster handles a frame of a peer that has added us. It runs in the reader.
func (c *conn) fromPoster(k kind, body []byte) error {
	switch k {
	case kindNotify:
		return c.notified(body)
	case kindWrite:
		w, err := decodeWrite(body)
		if err != nil {
			return err
		}
		return c.beginWrite(w)
	case kindRead:
		r, err := decodeRead(body)
		if err != nil {
			return err
		}
		return c.begin(&incoming{c: c, transfer: r.transfer, read: true, grantID: r.grant, bytes: r.bytes})
	case kindPieces:
		return c.morePieces(body)
	case kindCancel:
		id, err := decodeTransfer(body)
		if err != nil {
			return err
		}
		c.withdraw(id)
		return nil
	case kindReadEnd:
		id, err := decodeTransfer(body)
		if err != nil {
			return err
		}
		c.dropStaged(id)
		return nil
	}
	return c.both(k, body)
}

func (c *conn) notified(body []byte) error {
	if len(body) == 0 {
		return errMalformed
	}
	if limit := c.a.front.Limits.Notification; len(body) > limit {
		return &agent.LimitError{What: "bytes of a notification", Got: len(body), Limit: limit}
	}
	return c.share.Notify(append([]byte(nil), body...), nil)
}

func (c *conn) beginWrite(w writeFrame) error {
	watch, ok := watchWord(c.page, w.slot, w.word)
	if !ok {
		return fmt.Errorf("word %d is beyond the control page", w.slot)
	}
	if limit := c.a.front.Limits.Notification; len(w.notif) > limit {
		return &agent.LimitError{What: "bytes of a notification", Got: len(w.notif), Limit: limit}
	}
	return c.begin(&incoming{
		c: c, transfer: w.transfer, grantID: w.grant, bytes: w.bytes, watch: watch,
		silence: time.Duration(min(w.silence, 1<<62)), notif: append([]byte(nil), w.notif...),
	})
}

// begin starts to take in a transfer. What is wrong with it is told when its pieces are in.
func (c *conn) begin(j *incoming) error {
	if c.assembling != nil {
		return fmt.Errorf("transfer %d begins before transfer %d is told whole", j.transfer, c.assembling.transfer)
	}
	c.jobs.Lock()
	taken := c.jobs.byID[j.transfer] != nil
	c.jobs.Unlock()
	if taken {
		return fmt.Errorf("transfer %d begins twice", j.transfer)
	}
	access := agent.AccessWrite
	if j.read {
		access = agent.AccessRead
	}
	j.grant, j.refused = c.a.front.Grants.Find(j.grantID, c.id.Name, access)
	if j.refused == nil && j.bytes > uint64(maxAlloc) {
		j.refused = errOutside
	}
	c.page.hold()
	c.assembling = j
	return c.reserve(j, jobOverhead+len(j.notif))
}

// morePieces takes in a PIECES frame, and starts the transfer with the last.
func (c *conn) morePieces(body []byte) error {
	last, pieces, count, err := decodePieces(body)
	if err != nil {
		return err
	}
	j := c.assembling
	if j == nil {
		return errors.New("pieces of no transfer")
	}
	if j.refused == nil && len(j.pieces)+count > c.a.front.Limits.ListDescs+c.a.front.Limits.Registrations {
		j.refused = &agent.LimitError{What: "pieces of a transfer", Got: len(j.pieces) + count, Limit: c.a.front.Limits.ListDescs}
	}
	if j.refused == nil {
		if err := c.reserve(j, count*pieceCost); err != nil {
			return err
		}
	}
	for p := range pieces {
		if p.n == 0 || p.n > j.bytes-j.sum {
			return fmt.Errorf("transfer %d: pieces do not make the %d bytes announced", j.transfer, j.bytes)
		}
		j.sum += p.n
		if j.refused == nil {
			j.refused = j.addPiece(p)
		}
	}
	if !last {
		return nil
	}
	c.assembling = nil
	if j.sum != j.bytes {
		j.release()
		return fmt.Errorf("transfer %d: pieces make %d of the %d bytes announced", j.transfer, j.sum, j.bytes)
	}
	switch {
	case j.refused != nil:
		j.refuse(j.refused)
	case j.read:
		c.openRead(j)
	default:
		c.submit(j)
	}
	return nil
}

// addPiece checks a piece and places it in this process.
func (j *incoming) addPiece(p wirePiece) error {
	if j.read {
		if !j.grant.Covers(p.src, p.n) {
			return errOutside
		}
		j.pieces = append(j.pieces, span{src: p.src, n: p.n})
		return nil
	}
	if !j.grant.Covers(p.dst, p.n) {
		return errOutside
	}
	m := j.c.maps.find(p.src, p.n)
	if m == nil {
		return errForeign
	}
	j.from.add(m)
	j.pieces = append(j.pieces, span{dst: p.dst, src: m.at(p.src), n: p.n})
	return nil
}

// submit queues a transfer for copying.
func (c *conn) submit(j job) {
	if in, ok := j.(*incoming); ok {
		c.jobs.Lock()
		c.jobs.byID[in.transfer] = in
		c.jobs.Unlock()
	}
	c.a.workers.submit(&c.lane, j)
}

// reserve waits until what the connection's incoming transfers cost is within bounds. Copying makes
// room without waiting for anybody, so the wait is short; the peer's next frames wait with it.
func (c *conn) reserve(j *incoming, cost int) error {
	limit := (c.a.front.Limits.ListDescs+c.a.front.Limits.Registrations)*pieceCost + c.a.front.Limits.Notification + jobOverhead
	for {
		c.jobs.Lock()
		// Its own cost is bounded by itself; alone it always fits.
		if c.jobs.cost == j.cost || c.jobs.cost+cost <= limit {
			c.jobs.cost += cost
			j.cost += cost
			c.jobs.Unlock()
			return nil
		}
		if c.jobs.room == nil {
			c.jobs.room = make(chan struct{})
		}
		room := c.jobs.room
		c.jobs.Unlock()
		select {
		case <-room:
		case <-c.done:
			return c.ending.err
		}
	}
}

// release ends what an incoming transfer holds.
func (j *incoming) release() {
	j.from.drop()
	j.pieces = nil
	j.c.page.drop()
	c := j.c
	c.jobs.Lock()
	defer c.jobs.Unlock()
	if c.jobs.byID[j.transfer] == j {
		delete(c.jobs.byID, j.transfer)
	}
	c.jobs.cost -= j.cost
	j.cost = 0
	if c.jobs.room != nil {
		close(c.jobs.room)
		c.jobs.room = nil
	}
}

// refuse tells the poster that nothing of the transfer moves (any more), and why.
func (j *incoming) refuse(err error) {
	j.c.push(raw(appendRefused(nil, j.transfer, err.Error())))
	j.release()
}

// withdraw ends a transfer that its poster has cancelled, and answers once nothing of it moves.
func (c *conn) withdraw(id agent.TransferID) {
	if j := c.assembling; j != nil && j.transfer == id {
		c.assembling = nil
		j.refuse(errWithdrawn)
		return
	}
	c.jobs.Lock()
	j := c.jobs.byID[id]
	c.jobs.Unlock()
	switch {
	case j == nil:
		c.push(raw(appendRefused(nil, id, errUnknown.Error())))
	case j.state.CompareAndSwap(waiting, withdrawn):
		c.push(raw(appendRefused(nil, id, errWithdrawn.Error())))
	}
	// A running one finds its word changed at its next slice, and answers itself.
}

func (j *incoming) wide() bool { return j.bytes > 2*quantumBytes }

// step is job.step.
func (j *incoming) step(spans *[]span) (int, verdict) {
	if !j.state.CompareAndSwap(waiting, running) && j.state.Load() == withdrawn {
		return 0, j.dropWithdrawn()
	}
	cost, ok := j.share.claim(func() (int, bool) { return j.slice(spans) })
	if !ok {
		return 0, busy
	}
	last, err := j.copy(*spans)
	if !last {
		return cost, j.share.verdict()
	}
	switch {
	case errors.Is(err, events.ErrOverflow):
		j.c.fail(err)
		j.release()
	case err != nil:
		j.refuse(err)
	default:
		j.c.push(raw(appendTransfer(nil, kindDone, j.transfer)))
		j.release()
	}
	return cost, over
}

// dropWithdrawn ends a transfer whose poster has its answer already.
func (j *incoming) dropWithdrawn() verdict {
	if _, ok := j.share.claim(func() (int, bool) { return 0, true }); !ok {
		return busy
	}
	j.share.landed(nil)
	j.release()
	return over
}

// copy copies one slice inside the grant's gate. The last one decides, inside the same gate, that
// the transfer is whole, and delivers its notification: so it is whole, or Revoke came before.
func (j *incoming) copy(spans []span) (last bool, err error) {
	if j.c.dead() || !j.watch.holds() {
		return j.share.landed(errWithdrawn)
	}
	if !j.grant.Enter() {
		return j.share.landed(errRevokedIn)
	}
	defer j.grant.Leave()
	err = copySpans(spans)
	last, err = j.share.landed(err)
	if !last || err != nil {
		return last, err
	}
	if !j.watch.held(&j.fence) {
		return true, errWithdrawn
	}
	if len(j.notif) == 0 {
		return true, nil
	}
	return true, j.c.share.Notify(j.notif, &agent.Arrival{Bytes: int64(j.bytes), Took: time.Since(j.began)})
}

// slice fills spans with what is to be copied next, and gives its cost and whether it is the last.
func (j *incoming) slice(spans *[]span) (int, bool) {
	list := (*spans)[:0]
	room, cost := uint64(sliceBytes), 0
	for j.at < len(j.pieces) && room > 0 && len(list) < slicePieces {
		p := j.pieces[j.at]
		n := min(p.n-j.off, room)
		s := span{src: p.src + j.off, n: n}
		if !j.read {
			s.dst = p.dst + j.off
		}
		list = append(list, s)
		room -= n
		cost += int(n) + spanCost
		if j.off += n; j.off == p.n {
			j.at, j.off = j.at+1, 0
		}
	}
	*spans = list
	j.tell()
	return cost, j.at == len(j.pieces)
}

// tell shows the poster that bytes move, well within the bound of silence of this transfer, and often
// enough for those that wait behind it.
func (j *incoming) tell() {
	now := time.Now()
	if j.began.IsZero() {
		j.began, j.told = now, now
	}
	if !j.read && now.Sub(j.told) > min(j.silence/4, tellEvery) {
		j.told = now
		j.c.pushIfIdle(raw(frame(nil, kindProgress, 0)))
	}
}
