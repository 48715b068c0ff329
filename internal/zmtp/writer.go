package zmtp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"
)

// write is the writer goroutine: it pops the send queue and writes, and sends PINGs where asked for.
// The only timer is the heartbeat's.
func (l *link) write() {
	defer close(l.wrote)
	w := &writer{conn: l.conn, stall: l.opts.Timeouts.Stall}
	up := l.up
	var ticks <-chan time.Time
	for {
		if err := l.drain(w); err != nil {
			l.writeFailed(err)
			return
		}
		select {
		case <-l.out.wake:
		case <-l.done:
			return
		case <-up:
			up = nil
			if l.sendsPings() {
				ticker := time.NewTicker(l.opts.Heartbeat.Every)
				defer ticker.Stop()
				ticks = ticker.C
			}
		case <-ticks:
			l.out.setPing(appendPing(nil, l.opts.Heartbeat.TTL))
		}
	}
}

// writeFailed ends the writing half. If the peer is gone it may have sent something before, which the reader
// still gets: it has Stall to come to the end by itself, and then its reason counts.
func (l *link) writeFailed(err error) {
	l.writeErr = l.errorf("send", err)
	l.out.seal()
	if errors.Is(err, ErrTimeout) {
		l.kill("send", err)
		return
	}
	l.patience = time.AfterFunc(l.opts.Timeouts.Stall, func() { l.kill("send", err) })
}

// drain writes until the queue is empty.
func (l *link) drain(w *writer) error {
	for {
		item, ok := l.out.pop()
		if !ok {
			if err := w.flush(); err != nil {
				return err
			}
			if l.out.rest() {
				// an idle connection holds no buffer and no timer
				w.buf = nil
				_ = w.conn.SetWriteDeadline(time.Time{}) // fails on a closed connection only, and says nothing new
				return nil
			}
			continue
		}
		if err := w.item(item); err != nil {
			return err
		}
	}
}

// writer joins small pieces and cuts large ones. Each write has its own deadline, so that a peer that reads
// slowly but steadily is served, and one that stopped is dropped.
type writer struct {
	conn  net.Conn
	stall time.Duration
	buf   []byte
}

func (w *writer) item(it outItem) error {
	w.buf = append(w.buf, it.raw...)
	for i, f := range it.frames {
		var flags byte
		if i < len(it.frames)-1 {
			flags = flagMore
		}
		w.buf = appendFrameHeader(w.buf, flags, len(f))
		if len(f) <= copyBelow {
			w.buf = append(w.buf, f...)
		} else {
			if err := w.flush(); err != nil {
				return err
			}
			if err := w.all(f); err != nil {
				return err
			}
		}
		if len(w.buf) >= coalesceBytes {
			if err := w.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *writer) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	err := w.all(w.buf)
	w.buf = w.buf[:0]
	return err
}

func (w *writer) all(b []byte) error {
	for len(b) > 0 {
		piece := b[:min(len(b), writeChunkBytes)]
		if err := w.conn.SetWriteDeadline(time.Now().Add(w.stall)); err != nil {
			return err
		}
		if _, err := w.conn.Write(piece); err != nil {
			return slow(err)
		}
		b = b[len(piece):]
	}
	return nil
}

func slow(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%w: it stopped reading", ErrTimeout)
	}
	return err
}
