package tcp

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
	"github.com/kvferry/kvferry/agent/internal/front"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
)

var errRemoved = errors.New("the peer was removed")

// link is the poster's side of one added peer: a control connection and data streams that we
// dialed. Lock order: link.mu before the agent's mu.
type link struct {
	a       *Agent
	id      agent.PeerID
	addr    string
	welcome frame.Welcome // the peer's bounds
	share   *events.Peer
	control *conn
	streams []*stream

	mu struct {
		sync.Mutex
		work    *sync.Cond // signalled when there is something to send, or the end
		dead    error      // why the link has ended; nil while it stands
		running int        // goroutines

		lastWire  uint64
		transfers map[uint64]*outgoing
		writing   fifo // WRITEs with chunks to cut, in turn
		reading   fifo // READs likewise

		// Bounds that the peer has told, and the sum of chunks.
		writes, chunks, notifBytes int

		say      [][]byte // control frames to send, in order
		saying   bool     // the control stream's writer sends some
		sayBytes int      // of notifications alone in say
		sayCount int
	}
}

// fifo is a queue of transfers that take turns.
type fifo []*outgoing

func (f *fifo) drop(t *outgoing) {
	if i := slices.Index(*f, t); i >= 0 {
		*f = slices.Delete(*f, i, i+1)
	}
}

func (f *fifo) pop() *outgoing {
	t := (*f)[0]
	(*f)[0] = nil
	*f = (*f)[1:]
	return t
}

// stream is one data connection of a link.
type stream struct {
	*conn
	l *link
	// Guarded by link.mu: Fetches without an answer, oldest first.
	fetches []fetch
}

// fetch is a chunk of a READ that was asked for. Its ranges are local memory.
type fetch struct {
	t      *outgoing
	index  int
	ranges []frame.Range
	bytes  int
}

// fault is an error that names the peer.
func (l *link) fault(phase string, err error) error {
	return &agent.PeerError{Peer: l.id.Name, Addr: l.addr, Phase: phase, Err: err}
}

// start begins the link's goroutines, for which the agent has made room in its count.
func (l *link) start() {
	run := func(f func() error) {
		go func() {
			defer l.a.running.Done()
			if err := f(); err != nil {
				l.fail(err)
			}
			l.exit()
		}()
	}
	run(l.writeControl)
	run(func() error { return l.read(l.control, nil) })
	for _, s := range l.streams {
		run(s.write)
		run(func() error { return l.read(s.conn, s) })
	}
}

// fail ends the link because of an error, once.
func (l *link) fail(err error) { l.close(agent.OutcomePeerLost, err, true) }

// close ends the link: its transfers' Results come now, their Stoppeds and the PeerLost when no
// goroutine is left. tell is whether the user wants a PeerLost.
func (l *link) close(outcome agent.Outcome, err error, tell bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.dead != nil {
		return
	}
	l.mu.dead = err
	if !tell {
		l.share.Forget()
	}
	l.a.unlink(l)
	unstopped := len(l.mu.transfers) > 0
	for _, t := range l.mu.transfers {
		if !t.ended {
			t.end(outcome, err)
		}
	}
	l.mu.work.Broadcast()
	for _, c := range l.conns() {
		if unstopped {
			c.reset() // bytes of transfers in the kernel are not to be sent any more
		} else {
			_ = c.Close()
		}
	}
}

// flush waits until the control frames have left, the link ends or late says so.
func (l *link) flush(late *atomic.Bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for (len(l.mu.say) > 0 || l.mu.saying) && l.mu.dead == nil && !late.Load() {
		l.mu.work.Wait()
	}
}

func (l *link) conns() []*conn {
	cs := []*conn{l.control}
	for _, s := range l.streams {
		cs = append(cs, s.conn)
	}
	return cs
}

// exit is the end of one goroutine; the last one gives what is still owed.
func (l *link) exit() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.running--
	if l.mu.running > 0 {
		return
	}
	for _, t := range l.mu.transfers {
		t.stop()
	}
	l.a.front.Lists.RemoveOwner(l.id)
	l.share.Lost(l.mu.dead)
}

// post starts a checked transfer.
func (l *link) post(t *outgoing) error {
	c := l.a.cfg.ChunkBytes
	t.chunks = t.plan.Chunks(c, frame.MaxRanges)
	if t.chunks > frame.MaxChunks {
		return &agent.LimitError{What: "chunks of a transfer", Got: t.chunks, Limit: frame.MaxChunks}
	}
	t.cut = t.plan.Cut(c, frame.MaxRanges)
	t.acked = newBitset(t.chunks)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.dead != nil {
		return &agent.PostError{Op: t.plan.Op, Reason: fmt.Sprintf("peer %s is gone: %v", l.id.Name, l.mu.dead)}
	}
	if n := len(t.plan.Notif); n > l.welcome.Notif {
		return &agent.LimitError{What: "bytes of a notification that the peer takes", Got: n, Limit: l.welcome.Notif}
	}
	if t.plan.Op == agent.Write {
		w := &l.mu
		if w.writes >= l.welcome.Transfers || w.chunks+t.chunks > linkChunks ||
			w.notifBytes > 0 && w.notifBytes+len(t.plan.Notif) > l.welcome.NotifBytes {
			return agent.ErrBusy
		}
		w.writes++
		w.chunks += t.chunks
		w.notifBytes += len(t.plan.Notif)
	}
	if !l.a.front.Events.Reserve() {
		l.unpost(t)
		return agent.ErrBusy
	}
	t.id = l.a.adopt(t)
	if t.id == 0 {
		l.unpost(t)
		l.a.front.Events.Unreserve()
		return agent.ErrClosed
	}
	l.mu.lastWire++
	t.wire = l.mu.lastWire
	l.mu.transfers[t.wire] = t
	t.silence = time.AfterFunc(t.plan.Silence, t.check)
	if t.plan.Op == agent.Write {
		begin := frame.Begin{
			ID: t.wire, Chunks: t.chunks, Bytes: t.plan.Bytes, Grant: t.plan.Grant, Notif: t.plan.Notif,
		}
		l.mu.say = append(l.mu.say, begin.Append(nil))
		l.mu.writing = append(l.mu.writing, t)
	} else {
		l.mu.reading = append(l.mu.reading, t)
	}
	l.mu.work.Broadcast()
	return nil
}

// unpost takes back what post has counted. The caller holds mu.
func (l *link) unpost(t *outgoing) {
	if t.plan.Op == agent.Write {
		l.mu.writes--
		l.mu.chunks -= t.chunks
		l.mu.notifBytes -= len(t.plan.Notif)
	}
}

// cancel is Agent.Cancel.
func (l *link) cancel(t *outgoing) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !t.ended {
		t.end(agent.OutcomeCancelled, l.fault("transfer", errCancelled))
		t.cancel()
	}
}

// notify queues a notification.
func (l *link) notify(msg []byte) error {
	if len(msg) > l.welcome.Notif {
		return l.fault("notify", &agent.LimitError{What: "bytes of a notification that the peer takes", Got: len(msg), Limit: l.welcome.Notif})
	}
	l.mu.Lock()
	if l.mu.dead != nil {
		defer l.mu.Unlock()
		return l.fault("notify", fmt.Errorf("the peer is gone: %w", l.mu.dead))
	}
	limits := l.a.front.Limits
	if l.mu.sayCount >= limits.PeerNotifications || l.mu.sayBytes+len(msg) > limits.PeerNotificationBytes {
		err := fmt.Errorf("the peer does not take its notifications: %d of %d bytes wait", l.mu.sayCount, l.mu.sayBytes)
		l.mu.Unlock()
		l.fail(l.fault("notify", err))
		return l.fault("notify", err)
	}
	l.sayNotify(msg)
	l.mu.Unlock()
	return nil
}

// sayNotify and sayCancel queue control frames. The caller holds mu.
func (l *link) sayNotify(msg []byte) {
	l.mu.say = append(l.mu.say, frame.AppendNotify(nil, msg))
	l.mu.sayCount++
	l.mu.sayBytes += len(msg)
	l.mu.work.Broadcast()
}

func (l *link) sayCancel(wire uint64) {
	l.mu.say = append(l.mu.say, frame.AppendCancel(nil, wire))
	l.mu.work.Broadcast()
}

// newLink makes a link of connections that have been welcomed.
func newLink(a *Agent, name agent.Name, addr string, conns []*conn, w frame.Welcome) *link {
	l := &link{a: a, addr: addr, welcome: w, control: conns[0]}
	l.id.Name = name
	for _, c := range conns[1:] {
		l.streams = append(l.streams, &stream{conn: c, l: l})
	}
	l.mu.work = sync.NewCond(&l.mu)
	l.mu.transfers = map[uint64]*outgoing{}
	l.mu.running = 2 + 2*len(l.streams)
	return l
}

// pieces turns a cut chunk into the ranges of each side.
func pieces(cut []front.Piece, local, remote []frame.Range) (l, r []frame.Range, total int) {
	local, remote = local[:0], remote[:0]
	for _, p := range cut {
		local = append(local, frame.Range{Addr: p.Local, Len: p.N})
		remote = append(remote, frame.Range{Addr: p.Remote, Len: p.N})
		total += p.N
	}
	return local, remote, total
}
