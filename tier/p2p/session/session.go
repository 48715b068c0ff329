package session

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// session is what stands between this node and one peer, from the first dial to its end.
//
//	dialled ── their connect ──> admitting ── Admitted ──> our ack sent ──┐
//	   └────── their ack ──────────────────────────────────────────────── open
type session struct {
	h      *Hub
	peer   PeerID
	gen    kv.Generation
	remote netip.AddrPort
	link   link   // by which it reaches us; zero until it does
	host   string // where that comes from
	theirs *wire.P2PConnect
	agent  agent.PeerID
	// dialled: our connect is on its way. admitted: our agent can write to it. acked: we may send.
	dialled, admitted, acked bool
	dead                     bool
	up                       bool      // the connection stood
	polite                   bool      // it has said goodbye, perhaps after our end
	began, greeted, active   time.Time // greeted: its connect came
	handshake                *timer
	badKeys                  int
	offers                   bool // it has offered blocks to us, a store
	queued                   []wire.P2PMessage
	silence                  silence

	client clientRole
	server serverRole
}

// newSession dials a peer. Our connect is the first message; it says which connect of the peer's it answers,
// if any.
func (h *Hub) newSession(p PeerID, answers *wire.P2PConnect) *session {
	h.lastGen++
	s := &session{h: h, peer: p, gen: h.lastGen, began: h.now, active: h.now}
	s.client.init(s)
	s.server.init(s)
	h.sessions[p] = s
	begin := func() {
		local := h.hello(s, answers)
		h.emit(Dial{Peer: p, Gen: s.gen})
		s.sendNow(&local)
		s.dialled = true
		s.ack()
		s.opened()
	}
	if wait := h.pauses[p].Sub(h.now); wait > 0 {
		h.after(wait, func() {
			if !s.dead {
				begin()
			}
		})
	} else {
		begin()
	}
	s.handshake = h.after(h.cfg.HandshakeTimeout, func() { s.lost(Handshake, "no handshake in time") })
	return s
}

// hello is our connect for a session.
func (h *Hub) hello(s *session, answers *wire.P2PConnect) wire.P2PConnect {
	m := h.cfg.Local
	if m.Extension == nil {
		return m
	}
	ext := *m.Extension
	ext.Session, ext.Instance = uint64(s.gen), instanceFor(ext.Instance, s.peer)
	if answers != nil && answers.Extension != nil {
		ext.Answers = answers.Extension.Session
	}
	m.Extension = &ext
	return m
}

// isStale reports whether a connect answers that of another session than s, which may be nil: of one that has ended
// here, which its sender does not know yet.
func (s *session) isStale(m *wire.P2PConnect) bool {
	return m.Extension != nil && m.Extension.Answers != 0 && (s == nil || m.Extension.Answers != uint64(s.gen))
}

// ready reports whether both sides have admitted each other.
func (s *session) ready() bool { return s.dialled && s.acked && s.admitted }

// stock reports a peer that is no kvferry node.
func (s *session) stock() bool { return s.theirs != nil && s.theirs.Extension == nil }

// busy reports whether somebody waits for something of this session.
func (s *session) busy() bool {
	return !s.ready() || s.client.busy() || s.server.busy()
}

func (s *session) sendNow(m wire.P2PMessage) {
	s.h.emit(Send{Peer: s.peer, Gen: s.gen, Msg: m})
}

// send sends what only a peer that has admitted us may get.
func (s *session) send(m wire.P2PMessage) {
	switch {
	case s.dead:
	case s.ready():
		s.active = s.h.now
		s.sendNow(m)
	case len(s.queued) >= maxQueued:
		s.end(Overflow, "too much waits for its handshake")
	default:
		s.queued = append(s.queued, m)
	}
}

// receive handles one message, or what could not be read.
func (s *session) receive(m wire.P2PMessage, err error) {
	s.active = s.h.now
	s.silence.heard(s.h.now)
	switch {
	case errors.Is(err, wire.ErrP2PIgnored):
		s.h.note(s.peer, "message_ignored", "%v", err)
		return
	case errors.Is(err, wire.ErrP2PBadKey):
		s.h.note(s.peer, "message_ignored", "%v", err)
		if s.badKeys++; s.badKeys >= maxBadKeys {
			s.end(Protocol, "it goes on sending keys that are none")
		}
		return
	case err != nil:
		s.end(Protocol, err.Error())
		return
	}
	s.badKeys = 0
	switch m := m.(type) {
	case *wire.P2PConnect:
		s.onConnect(m)
		return
	case wire.P2PConnectAck:
		s.onAck()
		return
	case wire.P2PDisconnect:
		s.end(Goodbye, "it has disconnected")
		return
	}
	if !s.admitted {
		s.end(Protocol, "it sent a "+m.Type()+" before we had admitted it")
		return
	}
	switch m := m.(type) {
	case *wire.P2PLookup:
		s.server.onLookup(m)
	case *wire.P2PFetch:
		s.server.onFetch(m)
	case wire.P2PAbortFetch:
		s.server.onAbort(m)
	case *wire.P2PLookupResp:
		s.client.onLookupResp(m)
	case wire.P2PTransferDone:
		s.client.onDone(m)
	case wire.P2PAbortAck:
		s.client.onAbortAck(m)
	case *wire.P2POffer:
		s.onOffer(m)
	}
}

// onConnect checks what the peer is, in the order of p2p-tier.md, section 3.2, and begins to admit
// it. The ack waits until that is done: it is the peer's permission to send.
func (s *session) onConnect(m *wire.P2PConnect) {
	local := &s.h.cfg.Local
	switch {
	case s.theirs != nil:
		s.end(Protocol, "it sent a second connect")
		return
	case m.BlockLen != local.BlockLen:
		s.refuse("its blocks have %d bytes, ours %d", m.BlockLen, local.BlockLen)
		return
	case m.Fingerprint != "" && local.Fingerprint != "" && m.Fingerprint != local.Fingerprint:
		s.refuse("its model facts are others (fingerprint %s, ours %s)", m.Fingerprint, local.Fingerprint)
		return
	case m.HashSeed != local.HashSeed:
		s.refuse("its hash seed is another, so equal content has other keys there")
		return
	}
	if err := checkMemory(m); err != nil {
		s.refuse("%v", err)
		return
	}
	s.theirs, s.greeted = m, s.h.now
	s.h.emit(Admit{Peer: s.peer, Gen: s.gen, Connect: m})
}

func (s *session) refuse(format string, args ...any) {
	s.h.note(s.peer, "peer_refused", format, args...)
	s.h.refused(s.peer, Facts, fmt.Sprintf(format, args...))
	s.end(Facts, "refused")
}

func (s *session) onAck() {
	if s.theirs == nil {
		s.end(Protocol, "it sent a connect_ack before its connect")
		return
	}
	if !s.acked {
		s.acked = true
		s.opened()
	}
}

// admitted brings an admission's result to its session; one that nobody waits for is undone.
func (h *Hub) admitted(ev Admitted) {
	s := h.dialled(ev.Peer, ev.Gen)
	switch {
	case s == nil && ev.Err == nil:
		h.emit(Dismiss{Peer: ev.Peer, Gen: ev.Gen, Agent: ev.Agent})
	case s == nil || s.admitted:
	case ev.Err != nil:
		h.note(ev.Peer, "admission_failed", "%v", ev.Err)
		h.report(event.TierPeerAdmitted{Peer: string(ev.Peer), Took: h.now.Sub(s.greeted), Err: ev.Err})
		h.refused(ev.Peer, Admission, ev.Err.Error())
		s.end(Admission, "our agent cannot reach its agent")
	default:
		s.admitted, s.agent = true, ev.Agent
		h.report(event.TierPeerAdmitted{Peer: string(ev.Peer), Agent: string(ev.Agent.Name), Transport: ev.Transport, Took: h.now.Sub(s.greeted)})
		s.ack()
		s.opened()
	}
}

// ack permits the peer to send, once it is admitted. Our connect must come first: a peer that gets
// the ack before takes the connect for a second one.
func (s *session) ack() {
	if s.dialled && s.admitted {
		s.sendNow(wire.P2PConnectAck{PeerID: string(s.h.self)})
	}
}

// opened sends what has waited, once both sides have admitted each other.
func (s *session) opened() {
	if !s.ready() {
		return
	}
	s.h.stop(s.handshake)
	s.h.note(s.peer, "session_open", "blocks: %d", s.theirs.NumBlocks)
	s.h.count(s.peer, func(c *Counts) { c.SessionsOpened++ })
	s.h.report(event.TierSessionStarted{Peer: string(s.peer), Stock: s.stock(), Blocks: s.theirs.NumBlocks, Took: s.h.now.Sub(s.began)})
	queued := s.queued
	s.queued = nil
	for _, m := range queued {
		s.send(m)
	}
	s.client.pumpAll()
	s.storeOpened()
}

// lost ends the session because the connection, or the peer, is gone. Unless the peer turns out to
// have said goodbye, its other ranks, which are the same process, are given a moment to show life;
// those that do not are gone as well.
func (s *session) lost(reason Reason, why string) {
	if s.dead {
		return
	}
	s.end(reason, why)
	if s.theirs == nil || s.theirs.Extension == nil {
		return
	}
	h, at := s.h, s.h.now
	h.after(siblingGrace, func() {
		if s.polite {
			return
		}
		for _, other := range h.inOrder() {
			if other.instance() == s.instance() && !other.active.After(at) {
				other.end(Sibling, "another rank of the same process is gone: "+why)
			}
		}
	})
}

// instanceFor is what a process says of itself to one peer: to that one the same for all its ranks, and nothing that
// another peer could say in its place. Else who is told it could end, by going, sessions of others.
func instanceFor(secret string, p PeerID) string {
	sum := hmac.New(sha256.New, []byte(secret))
	_, _ = sum.Write([]byte(p)) // it never fails
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// instance names the peer's process; "" when it is not known.
func (s *session) instance() string {
	if s.theirs == nil || s.theirs.Extension == nil {
		return ""
	}
	return s.theirs.Extension.Instance
}

// end ends the session and everything that hangs on it. The peer is told, if it listens.
func (s *session) end(reason Reason, why string) {
	if s.dead {
		return
	}
	h := s.h
	wasStore := h.cfg.Store != "" && h.storeSession() == s
	s.dead = true
	delete(h.sessions, s.peer)
	for _, p := range slices.Sorted(maps.Keys(h.aliases)) {
		if h.aliases[p] == s {
			delete(h.aliases, p)
		}
	}
	h.stop(s.handshake)
	h.stop(s.silence.timer)
	h.note(s.peer, "session_ended", "%s", why)
	h.count(s.peer, func(c *Counts) {
		c.SessionsEnded++
		if reason == Protocol {
			c.ProtocolErrors++
		}
	})
	h.book.ended[reason]++
	h.report(event.TierSessionEnded{Peer: string(s.peer), Reason: string(reason), Why: why, Lasted: h.now.Sub(s.began)})
	s.sendNow(wire.P2PDisconnect{})
	h.emit(Hang{Peer: s.peer, Gen: s.gen})
	if s.link.id != 0 {
		h.emit(DropLink{Identity: s.link.identity, Link: s.link.id})
	}
	s.client.end(why)
	s.server.end()
	if s.theirs != nil {
		h.emit(Dismiss{Peer: s.peer, Gen: s.gen, Agent: s.agent})
	}
	if s.up {
		h.pause(s.peer)
	}
	s.storeEnded(wasStore)
}

// pause keeps the next dial to a peer away from this one's end.
func (h *Hub) pause(p PeerID) {
	if len(h.pauses) >= maxPauses {
		maps.DeleteFunc(h.pauses, func(_ PeerID, until time.Time) bool { return !until.After(h.now) })
	}
	if len(h.pauses) < maxPauses {
		h.pauses[p] = h.now.Add(redialPause)
	}
}
