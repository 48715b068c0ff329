package tcp

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
)

// acceptRetry is the pause after an accept that failed for want of resources.
const acceptRetry = 100 * time.Millisecond

// accept takes connections until the agent closes. Each has a goroutine from then on; without a
// Hello there are at most `strangers`.
func (a *Agent) accept() {
	defer a.running.Done()
	for {
		tc, err := a.listener.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // file descriptors have run out: what frees them takes time
			select {
			case <-time.After(acceptRetry):
				continue
			case <-a.ctx.Done():
				return
			}
		}
		c, err := newConn(tc, a.cfg.UserTimeout)
		if err != nil || !a.pend(c) {
			_ = tc.Close()
			continue
		}
		go func() {
			defer a.running.Done()
			a.greet(c)
		}()
	}
}

// pend counts a stranger; the one that has been silent longest makes room.
func (a *Agent) pend(c *conn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return false
	}
	if len(a.mu.pending) >= strangers {
		_ = a.mu.pending[0].Close()
		a.mu.pending = slices.Delete(a.mu.pending, 0, 1)
	}
	a.mu.pending = append(a.mu.pending, c)
	a.running.Add(1)
	return true
}

// unpend is the end of being a stranger. The caller holds mu.
func (a *Agent) unpend(c *conn) {
	if i := slices.Index(a.mu.pending, c); i >= 0 {
		a.mu.pending = slices.Delete(a.mu.pending, i, i+1)
	}
}

// greet reads the Hello of a connection and then serves it until its end.
func (a *Agent) greet(c *conn) {
	s, stream, err := a.readHello(c)
	if err != nil {
		c.offerWords(frame.AppendBye(nil, err.Error()))
		_ = c.Close()
		return
	}
	err = c.SetDeadline(time.Time{})
	if err == nil {
		_, err = c.Write(frame.Welcome{
			Transfers: a.front.Limits.Transfers, Notif: a.front.Limits.Notification,
			NotifBytes: a.front.Limits.PeerNotificationBytes, Name: string(a.name),
		}.Append(nil))
	}
	if err == nil {
		if stream == 0 {
			c.in = bufio.NewReaderSize(c.TCPConn, 16<<10)
			c.most = frame.MaxBody(frame.KindBegin, a.front.Limits.Notification)
			err = s.serveControl(c)
		} else {
			c.most = dataBody
			err = s.serveData(c)
		}
	}
	s.ended(c, stream, err)
}

// readHello finds or makes the session that a connection belongs to.
func (a *Agent) readHello(c *conn) (*session, int, error) {
	_ = c.SetDeadline(time.Now().Add(a.cfg.HandshakeTimeout)) // fails only when closed; so does next
	kind, body, err := c.next()
	var h frame.Hello
	if err == nil && kind != frame.KindHello {
		err = fmt.Errorf("the first frame is of kind %d, not a Hello", kind)
	}
	if err == nil {
		h, err = frame.DecodeHello(body)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unpend(c)
	if err != nil {
		return nil, 0, err
	}
	if a.mu.closed {
		return nil, 0, agent.ErrClosed
	}
	s := a.mu.sessions[h.Session]
	if h.Stream > 0 {
		if s == nil || string(s.id.Name) != h.Name {
			return nil, 0, errors.New("no such session")
		}
		return s, h.Stream, s.join(c, h.Stream)
	}
	if s != nil {
		return nil, 0, errors.New("the session exists already")
	}
	if n := len(a.mu.sessions); n >= a.front.Limits.Peers {
		return nil, 0, fmt.Errorf("as many peers as are allowed, %d, are connected", n)
	}
	if a.front.Events.Congested() {
		return nil, 0, errors.New("too many events of lost peers are waiting to be read")
	}
	a.mu.generation++
	s = newSession(a, h, agent.PeerID{Name: agent.Name(h.Name), Gen: a.mu.generation}, c)
	a.mu.sessions[h.Session] = s
	return s, 0, nil
}

// dismiss forgets a session that has ended.
func (a *Agent) dismiss(s *session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.mu.sessions, s.key)
}
