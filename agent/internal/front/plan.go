package front

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/internal/lists"
	"github.com/kvferry/kvferry/agent/internal/memory"
	"github.com/kvferry/kvferry/kv"
)

// Plan is a checked transfer. It holds the local memory that it touches until Release, and does not
// change.
type Plan struct {
	Op      agent.Op
	Peer    agent.PeerID
	Grant   agent.GrantID
	Notif   []byte
	Silence time.Duration
	Bytes   int64

	front         *Front
	local, remote *lists.List
	li, ri        []uint32
	held          []*memory.Range
}

// Check turns a transfer into a plan, or refuses it with *PostError or *LimitError. The caller's
// slices are copied.
func (f *Front) Check(t agent.Transfer) (*Plan, error) {
	refuse := func(format string, args ...any) (*Plan, error) {
		return nil, &agent.PostError{Op: t.Op, Reason: fmt.Sprintf(format, args...)}
	}
	local, remote := f.Lists.Get(t.Local), f.Lists.Get(t.Remote)
	switch {
	case t.Op > agent.Read:
		return refuse("unknown operation %d", t.Op)
	case local == nil || local.Owner != agent.Local:
		return refuse("list %d is not a prepared list of this agent's memory", t.Local)
	case remote == nil || remote.Owner == agent.Local:
		return refuse("list %d is not a prepared list of a peer; the peer may be gone", t.Remote)
	case len(t.LocalIdx) != len(t.RemoteIdx):
		return refuse("%d local indices and %d remote ones", len(t.LocalIdx), len(t.RemoteIdx))
	case len(t.LocalIdx) == 0:
		return refuse("no indices")
	case len(t.LocalIdx) > f.Limits.ListDescs:
		return nil, &agent.LimitError{What: "pairs in a transfer", Got: len(t.LocalIdx), Limit: f.Limits.ListDescs}
	case t.Silence <= 0:
		return refuse("bound of silence %v is not positive", t.Silence)
	case t.Notif != nil && len(t.Notif) == 0:
		return refuse("the notification is empty; nil means none")
	case len(t.Notif) > f.Limits.Notification:
		return nil, &agent.LimitError{What: "bytes of a notification", Got: len(t.Notif), Limit: f.Limits.Notification}
	}
	p := &Plan{
		Op: t.Op, Peer: remote.Owner, Grant: t.Grant, Notif: slices.Clone(t.Notif), Silence: t.Silence,
		front: f, local: local, remote: remote, li: slices.Clone(t.LocalIdx), ri: slices.Clone(t.RemoteIdx),
	}
	for k := range p.li {
		l, r := p.li[k], p.ri[k]
		if int64(l) >= int64(local.Size()) {
			return refuse("local index %d at position %d is beyond the list of %d", l, k, local.Size())
		}
		if int64(r) >= int64(remote.Size()) {
			return refuse("remote index %d at position %d is beyond the list of %d", r, k, remote.Size())
		}
		if ln, rn := local.Len(int(l)), remote.Len(int(r)); ln != rn {
			return refuse("lengths differ at position %d: %d bytes here, %d at the peer", k, ln, rn)
		}
		p.Bytes += int64(local.Len(int(l))) // ListDescs × lists.MaxDescBytes fits
	}
	held := local.Ranges(p.li)
	if r := f.Memory.Hold(held); r != nil {
		return refuse("memory of %s was deregistered", r.Owner)
	}
	p.held = held
	return p, nil
}

// Release lets go of the local memory. It is called once, when no byte moves any more.
func (p *Plan) Release() { p.front.Memory.Unhold(p.held) }

// Descs is the number of descriptor pairs.
func (p *Plan) Descs() int { return len(p.li) }

// Piece is N bytes that are contiguous on both sides.
type Piece struct {
	Local, Remote uint64
	N             int
}

// Cutter cuts a plan into chunks of pieces. It belongs to one goroutine at a time.
type Cutter struct {
	p        *Plan
	at       int    // pair
	done     uint64 // bytes of that pair already cut
	maxBytes int
	maxParts int
}

// Cut starts a cutter for chunks of at most maxBytes bytes in at most maxPieces pieces.
func (p *Plan) Cut(maxBytes, maxPieces int) *Cutter {
	return &Cutter{p: p, maxBytes: maxBytes, maxParts: maxPieces}
}

// Next appends the next chunk's pieces to buf[:0] and returns them; none means the end. Neighbours
// that touch on both sides become one piece.
func (c *Cutter) Next(buf []Piece) []Piece {
	buf = buf[:0]
	room := uint64(c.maxBytes)
	for c.at < len(c.p.li) && room > 0 {
		l, r := int(c.p.li[c.at]), int(c.p.ri[c.at])
		n := min(c.p.local.Len(l)-c.done, room)
		la, ra := c.p.local.Addr(l)+c.done, c.p.remote.Addr(r)+c.done
		if k := len(buf) - 1; k >= 0 && buf[k].Local+uint64(buf[k].N) == la && buf[k].Remote+uint64(buf[k].N) == ra {
			buf[k].N += int(n)
		} else if len(buf) < c.maxParts {
			buf = append(buf, Piece{Local: la, Remote: ra, N: int(n)})
		} else {
			break
		}
		room -= n
		c.done += n
		if c.done == c.p.local.Len(l) {
			c.at, c.done = c.at+1, 0
		}
	}
	return buf
}

// Chunks counts what Cut would give.
func (p *Plan) Chunks(maxBytes, maxPieces int) int {
	c, n := p.Cut(maxBytes, maxPieces), 0
	var buf []Piece
	for {
		if buf = c.Next(buf); len(buf) == 0 {
			return n
		}
		n++
	}
}

// RemoteRanges calls yield with the peer's side of each pair until it returns false.
func (p *Plan) RemoteRanges(yield func(kv.Descriptor) bool) {
	for _, i := range p.ri {
		if !yield(kv.Descriptor{Addr: p.remote.Addr(int(i)), Length: p.remote.Len(int(i))}) {
			return
		}
	}
}
