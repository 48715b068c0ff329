package tcp

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
)

// lastWords is how long the control stream is still read after another stream of its session has
// ended: what the peer said before it went is in the kernel already.
const lastWords = time.Second

// session is the listener's side of a peer that dialed us: its streams, one goroutine each, and the
// WRITEs that are coming in. Lock order: the agent's mu before session.mu; session.mu before gates.
type session struct {
	a     *Agent
	key   frame.Session
	id    agent.PeerID
	share *events.Peer

	mu struct {
		sync.Mutex
		streams []*conn // by number; nil = not connected
		joined  []bool  // by number: a stream connects once
		running int     // goroutines
		ending  error   // why the session ends; nil while it stands

		records    map[uint64]*record
		lastBegin  uint64 // the highest id that was begun
		chunks     int    // of all records
		notifBytes int    // of all records
	}
}

// newSession makes a session with its control stream.
func newSession(a *Agent, h frame.Hello, id agent.PeerID, control *conn) *session {
	s := &session{a: a, key: h.Session, id: id, share: a.front.Events.NewPeer(id, true)}
	s.mu.streams = make([]*conn, h.Streams+1)
	s.mu.joined = make([]bool, h.Streams+1)
	s.mu.streams[0], s.mu.joined[0] = control, true
	s.mu.running = 1
	s.mu.records = map[uint64]*record{}
	return s
}

// join adds a data stream.
func (s *session) join(c *conn, stream int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.mu.ending != nil:
		return errors.New("the session has ended")
	case stream >= len(s.mu.streams):
		return fmt.Errorf("stream %d of a session of %d", stream, len(s.mu.streams)-1)
	case s.mu.joined[stream]:
		return fmt.Errorf("stream %d is connected already", stream)
	}
	s.mu.streams[stream], s.mu.joined[stream] = c, true
	s.mu.running++
	return nil
}

// fault is an error that names the peer.
func (s *session) fault(err error) error {
	return &agent.PeerError{Peer: s.id.Name, Phase: "connection", Err: err}
}

// ended is the end of one stream's goroutine. It takes the session with it, at once if the peer did
// what is not allowed, after the control stream's last words if it is gone; the last goroutine
// tells the user.
func (s *session) ended(c *conn, stream int, err error) {
	gone := isGone(err)
	if err == nil {
		err = errors.New("the peer closed the connection")
	}
	s.mu.Lock()
	c.offerWords(frame.AppendBye(nil, err.Error()))
	_ = c.Close()
	s.mu.streams[stream] = nil
	if s.mu.ending == nil {
		s.mu.ending = err
		s.abandon()
		s.endOthers(gone)
	}
	s.mu.running--
	last := s.mu.running == 0
	err = s.mu.ending
	s.mu.Unlock()
	if last {
		s.a.dismiss(s)
		s.share.Lost(s.fault(err))
	}
}

// endOthers closes the streams that are left. The caller holds mu.
func (s *session) endOthers(lastly bool) {
	for i, c := range s.mu.streams {
		switch {
		case c == nil:
		case i == 0 && lastly:
			_ = c.SetReadDeadline(time.Now().Add(lastWords))
		default:
			_ = c.Close()
		}
	}
}

// isGone tells a peer that went from one that is thrown out.
func isGone(err error) bool {
	var errno syscall.Errno
	return err == nil || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &errno)
}

// close ends the session at once. tell is whether the user wants a PeerLost.
func (s *session) close(err error, tell bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !tell {
		s.share.Forget()
	}
	if s.mu.ending == nil {
		s.mu.ending = err
		s.abandon()
	}
	for _, c := range s.mu.streams {
		if c != nil {
			c.offerWords(frame.AppendBye(nil, err.Error()))
			_ = c.Close()
		}
	}
}

// abandon makes nothing of the incoming WRITEs be written any more. The caller holds mu.
func (s *session) abandon() {
	for _, r := range s.mu.records {
		s.drop(r)
	}
}

// serveControl is the goroutine of the control stream.
func (s *session) serveControl(c *conn) error {
	for {
		kind, body, err := c.next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var answer []byte
		switch kind {
		case frame.KindNotify:
			err = s.onNotify(body)
		case frame.KindBegin:
			answer, err = s.onBegin(body)
		case frame.KindCancel:
			answer, err = s.onCancel(body)
		default:
			err = fmt.Errorf("frame of kind %d on the control stream", kind)
		}
		if err == nil {
			err = s.answer(c, answer)
		}
		if err != nil {
			return err
		}
	}
}

// serveData is the goroutine of a data stream.
func (s *session) serveData(c *conn) error {
	var ranges []frame.Range
	for {
		if err := c.SetReadDeadline(time.Time{}); err != nil {
			return err
		}
		kind, body, err := c.next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var answer []byte
		switch kind {
		case frame.KindChunk:
			var f frame.Chunk
			if f, err = frame.DecodeChunk(body, ranges); err == nil {
				ranges = f.Ranges
				answer, err = s.onChunk(c, f)
			}
		case frame.KindFetch:
			var f frame.Fetch
			if f, err = frame.DecodeFetch(body, ranges); err == nil {
				ranges = f.Ranges
				answer, err = s.onFetch(c, f)
			}
		default:
			err = fmt.Errorf("frame of kind %d on a data stream", kind)
		}
		if err == nil {
			err = s.answer(c, answer)
		}
		if err != nil {
			return err
		}
	}
}

// answer writes a short answer on the stream it belongs to.
func (s *session) answer(c *conn, b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if err := c.SetWriteDeadline(time.Now().Add(s.a.cfg.StallTimeout)); err != nil {
		return err
	}
	_, err := c.Write(b)
	return err
}

func (s *session) onNotify(body []byte) error {
	msg, err := frame.DecodeNotify(body)
	if err != nil {
		return err
	}
	if limit := s.a.front.Limits.Notification; len(msg) > limit {
		return &agent.LimitError{What: "bytes of a notification", Got: len(msg), Limit: limit}
	}
	return s.share.Notify(append([]byte(nil), msg...), nil)
}

// onFetch answers with memory that a read grant includes.
func (s *session) onFetch(c *conn, f frame.Fetch) ([]byte, error) {
	g, err := s.a.front.Grants.Find(f.Grant, s.id.Name, agent.AccessRead)
	if err == nil && !covers(g, f.Ranges) {
		err = errOutside
	}
	if err != nil {
		return frame.Refused{ID: f.ID, Index: f.Index, Text: err.Error()}.Append(nil), nil
	}
	if err := c.SetWriteDeadline(time.Now().Add(s.a.cfg.StallTimeout)); err != nil {
		return nil, err
	}
	head := frame.Data{ID: f.ID, Index: f.Index, Bytes: f.Bytes}.Append(nil)
	_, err = c.send(head, f.Ranges, f.Bytes, g, func() {})
	return nil, err
}
