package tcp

import (
	"fmt"
	"net"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/front"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
)

// writeControl sends what is queued for the control stream, in order.
func (l *link) writeControl() error {
	for {
		l.mu.Lock()
		for len(l.mu.say) == 0 && l.mu.dead == nil {
			l.mu.work.Wait()
		}
		if l.mu.dead != nil {
			l.mu.Unlock()
			return nil
		}
		batch := net.Buffers(l.mu.say)
		count, bytes := l.mu.sayCount, l.mu.sayBytes
		l.mu.say, l.mu.saying = nil, true
		l.mu.Unlock()
		if err := l.control.SetWriteDeadline(time.Now().Add(l.a.cfg.StallTimeout)); err != nil {
			return l.fault("control stream", err)
		}
		if _, err := batch.WriteTo(l.control.TCPConn); err != nil {
			return l.fault("control stream", err)
		}
		// Only now does it no longer wait here.
		l.mu.Lock()
		l.mu.sayCount -= count
		l.mu.sayBytes -= bytes
		l.mu.saying = false
		l.mu.work.Broadcast() // for flush
		l.mu.Unlock()
	}
}

// job is one chunk that a stream's writer has taken.
type job struct {
	t             *outgoing
	index         int
	local, remote []frame.Range
	bytes         int
	cut           []front.Piece
}

// write sends chunks and Fetches as long as the link stands.
func (s *stream) write() error {
	var j job
	var head []byte
	for s.take(&j) {
		if j.t.plan.Op == agent.Read {
			f := frame.Fetch{ID: j.t.wire, Index: j.index, Grant: j.t.plan.Grant, Ranges: j.remote}
			head = f.Append(head[:0])
			if _, err := s.Write(head); err != nil {
				return s.l.fault("data stream", err)
			}
			j.t.first.CompareAndSwap(0, max(1, int64(time.Since(j.t.posted))))
			continue
		}
		f := frame.Chunk{ID: j.t.wire, Index: j.index, Chunks: j.t.chunks, Grant: j.t.plan.Grant, Ranges: j.remote}
		head = f.Append(head[:0])
		if _, err := s.send(head, j.local, j.bytes, j.t, j.t.moved); err != nil {
			return s.l.fault("data stream", err)
		}
	}
	return nil
}

// take waits for the next chunk of the transfer whose turn it is; false means the end.
func (s *stream) take(j *job) bool {
	l := s.l
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if l.mu.dead != nil {
			return false
		}
		// A full window of Fetches leaves the stream to WRITEs.
		turn := &l.mu.writing
		if len(s.fetches) < fetchesAhead && len(l.mu.reading) > 0 && (len(l.mu.writing) == 0 || len(s.fetches) == 0) {
			turn = &l.mu.reading
		}
		if len(*turn) == 0 {
			l.mu.work.Wait()
			continue
		}
		t := turn.pop()
		if t.ended {
			continue
		}
		j.cut = t.cut.Next(j.cut)
		j.t, j.index = t, t.next
		t.next++
		if t.next < t.chunks {
			*turn = append(*turn, t)
		}
		j.local, j.remote, j.bytes = pieces(j.cut, j.local, j.remote)
		if t.plan.Op == agent.Read {
			s.fetches = append(s.fetches, fetch{t: t, index: j.index, ranges: j.local, bytes: j.bytes})
			j.local = nil // the fetch keeps it
		}
		return true
	}
}

// read takes the peer's answers on one connection; s is nil on the control stream.
func (l *link) read(c *conn, s *stream) error {
	for {
		kind, body, err := c.next()
		if err != nil {
			return l.fault("connection", err)
		}
		switch kind {
		case frame.KindBye:
			text, err := frame.DecodeBye(body)
			if err == nil {
				err = fmt.Errorf("the peer ended the connection: %s", text)
			}
			return l.fault("connection", err)
		case frame.KindAck:
			err = l.onAck(body)
		case frame.KindDone:
			err = l.onDone(body)
		case frame.KindRefused:
			err = l.onRefused(body, s)
		case frame.KindCancelled:
			err = l.onCancelled(body)
		case frame.KindData:
			err = l.onData(body, s)
		default:
			err = fmt.Errorf("a listener does not send frames of kind %d", kind)
		}
		if err != nil {
			return l.fault("protocol", err)
		}
	}
}
