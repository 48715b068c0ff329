package tcp

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
)

// The poster's side of what the listener answers. Answers to transfers that have ended meanwhile
// are dropped; what no honest listener says ends the link.

func (l *link) onAck(body []byte) error {
	id, index, err := frame.DecodeAck(body)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.mu.transfers[id]
	if t == nil || t.ended {
		return nil
	}
	if t.plan.Op != agent.Write || index >= t.next || !t.acked.add(index) {
		return fmt.Errorf("chunk %d of transfer %d was acknowledged, which it cannot be", index, id)
	}
	t.have++
	t.moved()
	return nil
}

func (l *link) onDone(body []byte) error {
	id, err := frame.DecodeDone(body)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.mu.transfers[id]
	if t == nil || t.ended {
		return nil
	}
	if t.plan.Op != agent.Write || t.next != t.chunks {
		return fmt.Errorf("transfer %d is said to be done, of which %d of %d chunks were sent", id, t.next, t.chunks)
	}
	t.end(agent.OutcomeDone, nil)
	t.stop()
	return nil
}

// onRefused ends a transfer: the listener has promised to write nothing more of it.
func (l *link) onRefused(body []byte, s *stream) error {
	f, err := frame.DecodeRefused(body)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if s != nil && len(s.fetches) > 0 && s.fetches[0].t.wire == f.ID && s.fetches[0].index == f.Index {
		s.answered()
	}
	t := l.mu.transfers[f.ID]
	if t == nil {
		return nil
	}
	if !t.ended {
		t.end(agent.OutcomeFailed, l.fault("transfer", errors.New("refused by the peer: "+f.Text)))
	}
	t.stop()
	return nil
}

func (l *link) onCancelled(body []byte) error {
	id, err := frame.DecodeCancelled(body)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	t := l.mu.transfers[id]
	if t == nil {
		return nil
	}
	if !t.ended {
		return fmt.Errorf("transfer %d is said to be cancelled, which nobody asked for", id)
	}
	t.stop()
	return nil
}

// answered forgets the oldest Fetch. The caller holds the link's mu.
func (s *stream) answered() fetch {
	f := s.fetches[0]
	s.fetches[0] = fetch{}
	s.fetches = s.fetches[1:]
	s.l.mu.work.Broadcast()
	return f
}

// onData receives a chunk of a READ straight into place.
func (l *link) onData(body []byte, s *stream) error {
	d, err := frame.DecodeData(body)
	if err != nil {
		return err
	}
	if s == nil {
		return errors.New("data on the control stream")
	}
	l.mu.Lock()
	if len(s.fetches) == 0 {
		l.mu.Unlock()
		return errors.New("data that was not asked for")
	}
	f := s.fetches[0]
	l.mu.Unlock()
	if f.t.wire != d.ID || f.index != d.Index || f.bytes != d.Bytes {
		return fmt.Errorf("chunk %d of transfer %d with %d bytes instead of chunk %d of transfer %d with %d",
			d.Index, d.ID, d.Bytes, f.index, f.t.wire, f.bytes)
	}
	placed, trailer, err := s.receive(f.ranges, f.bytes, f.t, f.t.moved)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s.answered()
	t := f.t
	switch {
	case t.ended:
	case trailer.Abandoned:
		t.end(agent.OutcomeFailed, l.fault("transfer", errors.New("refused by the peer: the grant was revoked during the transfer")))
		t.stop()
	case !placed || trailer.CRC != s.rx.crc:
		t.end(agent.OutcomeFailed, l.fault("transfer", errChecksum))
		t.stop()
	default:
		t.acked.add(f.index)
		if t.have++; t.have == t.chunks {
			if t.plan.Notif != nil {
				l.sayNotify(t.plan.Notif)
			}
			t.end(agent.OutcomeDone, nil)
			t.stop()
		}
	}
	return nil
}
