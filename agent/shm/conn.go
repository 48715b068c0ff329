package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/events"
)

var (
	errClosedByPeer = errors.New("the peer closed the connection or died")
	errRemoved      = errors.New("the peer was removed")
	errDeaf         = errors.New("the peer does not read what is sent to it")
)

// conn is one connection after the hello, on the side that added the peer (poster) or on the one
// that was added (giver).
type conn struct {
	a       *Agent
	id      agent.PeerID
	inbound bool // we are the giver
	sock    *net.UnixConn
	share   *events.Peer
	page    *mapping // the peer's control page

	done     chan struct{} // closed by fail
	progress atomic.Int64  // when bytes last moved for us, on Agent's clock

	// Owned by the reader.
	in         *receiver
	maps       *mappings
	assembling *incoming

	lane lane // guarded by a.workers.mu

	// transfers posted to this peer. Guarded by a.mu.
	transfers map[*transfer]struct{}

	out outbox

	// jobs of a giver.
	jobs struct {
		sync.Mutex
		cost   int           // of all incoming transfers
		room   chan struct{} // made by a reader that waits for room, closed by release
		byID   map[agent.TransferID]*incoming
		staged map[agent.TransferID]*segment // for READs out of borrowed memory
		bytes  uint64                        // of staged, also those being made
		ended  bool
	}

	ending struct {
		sync.Once
		err error // why; set before done is closed
	}
}

func (a *Agent) newConn(id agent.PeerID, inbound bool, in *receiver, page *mapping) *conn {
	c := &conn{
		a: a, id: id, inbound: inbound, sock: in.sock, in: in, page: page,
		share: a.front.Events.NewPeer(id, inbound), done: make(chan struct{}),
		maps: newMappings(a.front.Limits.Registrations), transfers: map[*transfer]struct{}{},
	}
	c.jobs.byID = map[agent.TransferID]*incoming{}
	c.jobs.staged = map[agent.TransferID]*segment{}
	c.out.init()
	return c
}

// start runs the reader and the writer. The caller counts as one of the agent's goroutines.
func (c *conn) start() {
	c.a.goroutines.Add(2)
	go c.read()
	go c.write()
}

// fail ends the connection; the first cause counts.
func (c *conn) fail(err error) {
	c.ending.Do(func() {
		c.ending.err = err
		close(c.done)
		_ = c.sock.Close()
	})
}

func (c *conn) dead() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// read is the reader: it carries out what the peer says until the connection ends, and then
// releases all that came over it.
func (c *conn) read() {
	defer c.a.goroutines.Done()
	for {
		k, body, err := c.in.next()
		c.a.pass(c.done)
		if err == nil {
			if c.inbound {
				err = c.fromPoster(k, body)
			} else {
				err = c.fromGiver(k, body)
			}
			if err != nil {
				err = fmt.Errorf("the peer was told to go: %w", err)
			}
		} else if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
			err = errClosedByPeer
		}
		if err != nil {
			c.fail(err)
			break
		}
	}
	c.a.gone(c, c.ending.err)
	c.in.release()
	c.maps.release()
	if c.assembling != nil {
		c.assembling.release()
	}
	c.releaseStaged()
	c.page.drop()
}

// both handles the frames that either side sends.
func (c *conn) both(k kind, body []byte) error {
	switch k {
	case kindSegment:
		s, err := decodeSegment(body)
		if err != nil {
			return err
		}
		fd, err := c.in.takeFD()
		if err != nil {
			return err
		}
		return c.maps.add(s, fd)
	case kindForget:
		id, err := decodeForget(body)
		if err != nil {
			return err
		}
		return c.maps.forget(id)
	}
	return fmt.Errorf("frame of kind %d does not belong here", k)
}

// outbox is what waits to be sent on one connection.
type outbox struct {
	wake chan struct{}
	mu   struct {
		sync.Mutex
		items     []outgoing
		notes     int // notifications among them, and their bytes
		noteBytes int
		sent      map[uint32]struct{} // segments that the peer was told of
		flushed   []chan struct{}     // closed when nothing waits any more
	}
}

// outgoing is something to send. send runs in the connection's writer.
type outgoing interface{ send(w *writer) error }

// raw is encoded frames.
type raw []byte

func (r raw) send(w *writer) error { return w.put(r) }

// note is an encoded notification.
type note []byte

func (n note) send(w *writer) error { return w.put(n) }

func (o *outbox) init() {
	o.wake = make(chan struct{}, 1)
	o.mu.sent = map[uint32]struct{}{}
}

// push queues an item. Beyond maxQueued the peer is lost.
func (c *conn) push(it outgoing) {
	c.out.mu.Lock()
	full := len(c.out.mu.items) >= maxQueued
	if !full {
		c.out.mu.items = append(c.out.mu.items, it)
	}
	c.out.mu.Unlock()
	if full {
		c.fail(errDeaf)
		return
	}
	c.out.poke()
}

// pushIfIdle queues an item unless others wait: it only shows that we live.
func (c *conn) pushIfIdle(it outgoing) {
	c.out.mu.Lock()
	idle := len(c.out.mu.items) == 0
	if idle {
		c.out.mu.items = append(c.out.mu.items, it)
	}
	c.out.mu.Unlock()
	if idle {
		c.out.poke()
	}
}

// notify queues a notification, or loses the peer that lets too many wait.
func (c *conn) notify(msg []byte) error {
	limits := c.a.front.Limits
	c.out.mu.Lock()
	full := c.out.mu.notes >= limits.PeerNotifications || c.out.mu.noteBytes+len(msg) > limits.PeerNotificationBytes
	if !full {
		b := append(frame(make([]byte, 0, headerBytes+len(msg)), kindNotify, len(msg)), msg...)
		c.out.mu.items = append(c.out.mu.items, note(b))
		c.out.mu.notes++
		c.out.mu.noteBytes += len(msg)
	}
	c.out.mu.Unlock()
	if full {
		err := fmt.Errorf("its share of notifications waits to be sent: %w", errDeaf)
		c.fail(err)
		return err
	}
	c.out.poke()
	return nil
}

// flush returns a channel that is closed when all that waits now was sent. A connection that ends never
// closes it.
func (o *outbox) flush() <-chan struct{} {
	ch := make(chan struct{})
	o.mu.Lock()
	o.mu.flushed = append(o.mu.flushed, ch)
	o.mu.Unlock()
	o.poke()
	return ch
}

// left tells who waits for flush, unless more has come.
func (o *outbox) left() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.mu.items) > 0 {
		return
	}
	for _, ch := range o.mu.flushed {
		close(ch)
	}
	o.mu.flushed = nil
}

// remove takes back a transfer that the writer has not begun to send.
func (o *outbox) remove(t *transfer) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i, it := range o.mu.items {
		if it == outgoing(t) {
			o.mu.items = append(o.mu.items[:i], o.mu.items[i+1:]...)
			return true
		}
	}
	return false
}

// forget tells the peer of freed memory, if it was told of the memory.
func (c *conn) forget(id uint32) {
	c.out.mu.Lock()
	_, told := c.out.mu.sent[id]
	if told {
		delete(c.out.mu.sent, id)
		c.out.mu.items = append(c.out.mu.items, raw(appendForget(nil, id)))
	}
	c.out.mu.Unlock()
	if told {
		c.out.poke()
	}
}

func (o *outbox) poke() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// writer encodes and sends. It belongs to the writing goroutine.
type writer struct {
	c   *conn
	buf []byte
}

// flushAt is when buffered frames are sent though more wait.
const flushAt = 64 << 10

// write is the writing goroutine.
func (c *conn) write() {
	defer c.a.goroutines.Done()
	w := &writer{c: c}
	for {
		c.out.mu.Lock()
		items := c.out.mu.items
		c.out.mu.Unlock()
		if len(items) == 0 {
			if !w.step(w.flush()) {
				return
			}
			c.out.left()
			select {
			case <-c.out.wake:
				continue
			case <-c.done:
				return
			}
		}
		c.a.pass(c.done)
		it := c.out.take()
		if it != nil && !w.step(it.send(w)) {
			return
		}
	}
}

// step ends the connection on an error.
func (w *writer) step(err error) bool {
	if err == nil {
		return !w.c.dead()
	}
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		// The reader finds the same, and before it all that the peer still said.
		return false
	}
	w.c.fail(err)
	return false
}

// take is the oldest item.
func (o *outbox) take() outgoing {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.mu.items) == 0 {
		return nil
	}
	it := o.mu.items[0]
	o.mu.items[0] = nil
	o.mu.items = o.mu.items[1:]
	if n, ok := it.(note); ok {
		o.mu.notes--
		o.mu.noteBytes -= len(n) - headerBytes
	}
	return it
}

func (w *writer) put(b []byte) error {
	w.buf = append(w.buf, b...)
	if len(w.buf) >= flushAt {
		return w.flush()
	}
	return nil
}

func (w *writer) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	_, err := w.c.sock.Write(w.buf)
	if w.buf = w.buf[:0]; cap(w.buf) > 4*flushAt {
		w.buf = nil
	}
	return err
}

// ensure tells the peer of a segment once. It reports false if the segment was freed.
func (w *writer) ensure(s *segment) (bool, error) {
	o := &w.c.out
	o.mu.Lock()
	_, told := o.mu.sent[s.id]
	o.mu.Unlock()
	if told {
		return true, nil
	}
	fd, err := s.dup()
	if err != nil {
		return false, nil
	}
	defer closeFD(fd)
	if err := w.flush(); err != nil {
		return false, err
	}
	if err := sendFD(w.c.sock, segmentFrame{id: s.id, addr: s.addr, length: s.end - s.addr}.append(nil), fd); err != nil {
		return false, err
	}
	o.mu.Lock()
	o.mu.sent[s.id] = struct{}{}
	o.mu.Unlock()
	// Whoever freed it meanwhile did not find it told.
	if s.gone() {
		w.c.forget(s.id)
	}
	return true, nil
}

// now is the agent's clock for progress.
func (a *Agent) now() int64 { return int64(time.Since(a.born)) }
