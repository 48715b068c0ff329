package tcp

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/gate"
	"github.com/kvferry/kvferry/agent/internal/grants"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
)

var (
	errOutside = errors.New("a range lies outside of the grant")
	errRevoked = errors.New("the grant was revoked during the transfer")
	errSum     = errors.New("checksum of the received bytes is wrong")
	errBytes   = errors.New("the chunks are not as many bytes as were announced")
)

// record is one WRITE that is coming in. It exists from its first frame, Begin or Chunk, until it
// is done, refused or cancelled; one that was refused before its Begin stays until that comes, so
// that no later chunk of it starts anew. Guarded by session.mu, but for the gate and what does not
// change.
type record struct {
	gate.Gate // open while it may be written

	id      uint64
	grantID agent.GrantID
	grant   *grants.Grant // nil if there is none
	chunks  int
	first   time.Time // when its first byte was on its way

	begun, failed bool
	started       bitset // chunks whose payload has begun to be read: each at most once
	have          int    // chunks in place
	bytes         int64  // in place
	total         int64  // announced by Begin
	notif         []byte
}

func covers(g *grants.Grant, ranges []frame.Range) bool {
	for _, r := range ranges {
		if !g.Covers(r.Addr, uint64(r.Len)) {
			return false
		}
	}
	return true
}

// record finds or makes a transfer's record. nil means that it has ended. The caller holds mu.
func (s *session) record(id uint64, chunks int, grant agent.GrantID) (*record, error) {
	r := s.mu.records[id]
	switch {
	case s.mu.ending != nil:
		return nil, s.mu.ending
	case r != nil:
		if r.chunks != chunks || r.grantID != grant {
			return nil, fmt.Errorf("frames of transfer %d contradict each other", id)
		}
		return r, nil
	case id <= s.mu.lastBegin:
		return nil, nil
	case len(s.mu.records) >= s.a.front.Limits.Transfers+recordSlack || s.mu.chunks+chunks > sessionChunks:
		return nil, fmt.Errorf("%d transfers of %d chunks are under way, more than allowed", len(s.mu.records), s.mu.chunks)
	}
	r = &record{id: id, grantID: grant, chunks: chunks, started: newBitset(chunks), first: time.Now()}
	r.grant, _ = s.a.front.Grants.Find(grant, s.id.Name, agent.AccessWrite)
	s.mu.records[id] = r
	s.mu.chunks += chunks
	return r, nil
}

// drop forgets a record; when it returns, nothing of it is written any more. The caller holds mu.
func (s *session) drop(r *record) {
	r.Shut()
	delete(s.mu.records, r.id)
	s.mu.chunks -= r.chunks
	s.mu.notifBytes -= len(r.notif)
}

// refuse ends a record because of err and gives the answer. The caller holds mu.
func (s *session) refuse(r *record, err error) []byte {
	if r.failed || s.mu.records[r.id] != r {
		return nil
	}
	r.failed = true
	r.Shut()
	if r.begun {
		s.drop(r)
	}
	return frame.Refused{ID: r.id, Text: err.Error()}.Append(nil)
}

func (s *session) onBegin(body []byte) ([]byte, error) {
	f, err := frame.DecodeBegin(body)
	if err != nil {
		return nil, err
	}
	limits := s.a.front.Limits
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case f.ID <= s.mu.lastBegin:
		return nil, fmt.Errorf("transfer %d begins after transfer %d", f.ID, s.mu.lastBegin)
	case len(f.Notif) > limits.Notification:
		return nil, &agent.LimitError{What: "bytes of a notification", Got: len(f.Notif), Limit: limits.Notification}
	case s.mu.notifBytes > 0 && s.mu.notifBytes+len(f.Notif) > limits.PeerNotificationBytes:
		return nil, &agent.LimitError{What: "bytes of attached notifications", Got: s.mu.notifBytes + len(f.Notif), Limit: limits.PeerNotificationBytes}
	}
	r, err := s.record(f.ID, f.Chunks, f.Grant)
	if err != nil {
		return nil, err
	}
	s.mu.lastBegin = f.ID
	r.begun, r.total, r.notif = true, f.Bytes, slices.Clone(f.Notif)
	s.mu.notifBytes += len(r.notif)
	if r.failed {
		s.drop(r) // refused already
		return nil, nil
	}
	return s.settle(r)
}

// settle delivers a WRITE that has become whole and gives the answer. The caller holds mu.
func (s *session) settle(r *record) ([]byte, error) {
	if !r.begun || r.have < r.chunks {
		return nil, nil
	}
	if r.bytes != r.total {
		return s.refuse(r, errBytes), nil
	}
	if !r.grant.Enter() {
		return s.refuse(r, errRevoked), nil
	}
	defer r.grant.Leave() // who revokes finds the notification queued, or never sees it
	s.drop(r)
	if r.notif != nil {
		err := s.share.Notify(r.notif, &agent.Arrival{Bytes: r.bytes, Took: time.Since(r.first)})
		if err != nil {
			return nil, err
		}
	}
	return frame.AppendDone(nil, r.id), nil
}

// onCancel promises that nothing of a WRITE is written any more.
func (s *session) onCancel(body []byte) ([]byte, error) {
	id, err := frame.DecodeCancel(body)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if id > s.mu.lastBegin {
		return nil, fmt.Errorf("transfer %d is cancelled before it has begun", id)
	}
	if r := s.mu.records[id]; r != nil {
		s.drop(r)
	}
	return frame.AppendCancelled(nil, id), nil
}

// onChunk receives a part of a WRITE straight into place, if all of it is permitted.
func (s *session) onChunk(c *conn, f frame.Chunk) ([]byte, error) {
	r, answer, err := s.claim(f)
	if err != nil {
		return nil, err
	}
	var way passage
	if r != nil {
		way = both{r, r.grant}
	}
	// One deadline for the whole payload: who sends it slower than this is as good as gone.
	if err := c.SetReadDeadline(time.Now().Add(s.a.cfg.StallTimeout)); err != nil {
		return nil, err
	}
	if answer != nil {
		if err := s.answer(c, answer); err != nil {
			return nil, err
		}
	}
	placed, t, err := c.receive(f.Ranges, f.Bytes, way, func() {})
	if err != nil || r == nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.records[r.id] != r || r.failed:
		return nil, nil // ended by another stream or by Cancel
	case t.Abandoned:
		r.failed = true // the poster knows; its Cancel follows
		r.Shut()
		return nil, nil
	case !placed:
		return s.refuse(r, errRevoked), nil
	case t.CRC != c.rx.crc:
		return s.refuse(r, errSum), nil
	}
	r.have++
	r.bytes += int64(f.Bytes)
	last, err := s.settle(r)
	return append(frame.AppendAck(nil, r.id, f.Index), last...), err
}

// claim decides about a chunk before its payload is read: the record to receive it for, or none and
// perhaps an answer. A chunk that was claimed before, an attempt to count it twice, is an error.
func (s *session) claim(f frame.Chunk) (*record, []byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.record(f.ID, f.Chunks, f.Grant)
	if err != nil || r == nil {
		return nil, nil, err
	}
	if !r.started.add(f.Index) {
		return nil, nil, fmt.Errorf("chunk %d of transfer %d comes a second time", f.Index, f.ID)
	}
	switch {
	case r.failed:
		return nil, nil, nil
	case r.grant == nil:
		return nil, s.refuse(r, grants.ErrNone), nil
	case !covers(r.grant, f.Ranges):
		return nil, s.refuse(r, errOutside), nil
	}
	return r, nil, nil
}
