package session

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// A store is a node that keeps what others offer it. This node may have one (Config.Store), or be one
// (CapP2PStore among its capabilities):
//
//	engine                                    store
//	   │ offer(keys)                             │ bounded, never waited for
//	   │ ──────────────────────────────────────> │
//	   │ <────────────────────────────── lookup… │ an ordinary fetch, at the store's own pace
//	   │ lookup… of a request without a source   │
//	   │ ──────────────────────────────────────> │
//
// Nothing waits for a store: what is not offered while it is away is offered when it is back, if it is still in
// memory, and requests ask it only while a session with it is open.
type ownStore struct {
	up    bool          // the session is open
	pause time.Duration // between the last session's end and the next dial
	next  time.Time     // no dial before
}

// takesOffers reports whether this node is a store.
func (h *Hub) takesOffers() bool { return h.cfg.Local.Extension.Has(wire.CapP2PStore) }

// callStore dials this node's store, unless there is a session with it, or one has just ended.
func (h *Hub) callStore() {
	if h.cfg.Store == "" || h.shut || h.sessions[h.cfg.Store] != nil || h.aliases[h.cfg.Store] != nil || h.now.Before(h.store.next) {
		return
	}
	if _, why := h.reach(h.cfg.Store); why != "" {
		h.note(h.cfg.Store, "store_unreachable", "%s", why)
		h.storeLost()
	}
}

// storeSession is the session with this node's store, open or not.
func (h *Hub) storeSession() *session {
	if s := h.sessions[h.cfg.Store]; s != nil {
		return s
	}
	return h.aliases[h.cfg.Store]
}

// storeOpened is called of every session that opens.
func (s *session) storeOpened() {
	h := s.h
	if h.cfg.Store == "" || h.storeSession() != s {
		return
	}
	if !s.theirs.Extension.Has(wire.CapP2PStore) {
		h.note(s.peer, "no_store", "it takes no offers, so it is only asked for what it has itself")
	}
	h.store.pause = 0
	if !h.store.up {
		h.store.up = true
		h.emit(StoreUp{Up: true})
	}
}

// storeLost notes that the session with the store has ended, or could not be made.
func (h *Hub) storeLost() {
	h.store.pause = min(max(minStorePause, 2*h.store.pause), maxStorePause)
	h.store.next = h.now.Add(h.store.pause)
	if h.store.up {
		h.store.up = false
		h.emit(StoreUp{})
	}
}

// offer tells the store of blocks that are in this node's memory now.
func (h *Hub) offer(keys []core.Key) {
	if h.cfg.Store == "" || len(keys) == 0 {
		return
	}
	h.callStore()
	s := h.storeSession()
	if s == nil || !s.ready() || !s.theirs.Extension.Has(wire.CapP2PStore) {
		return
	}
	for part := range slices.Chunk(keys, maxOfferKeys) {
		s.send(&wire.P2POffer{Keys: part})
	}
}

// onOffer takes a peer's offer.
func (s *session) onOffer(m *wire.P2POffer) {
	if !s.h.takesOffers() {
		s.end(Protocol, "it offers blocks, and this node is no store")
		return
	}
	if len(m.Keys) > maxOfferKeys {
		s.end(Protocol, fmt.Sprintf("it offers %d blocks at once, more than %d", len(m.Keys), maxOfferKeys))
		return
	}
	if len(m.Keys) == 0 {
		return
	}
	s.offers = true
	s.h.emit(Offered{Peer: s.peer, Gen: s.gen, Keys: m.Keys})
}

// storeEnded is called of every session that ends.
func (s *session) storeEnded(wasStore bool) {
	if wasStore {
		s.h.storeLost()
	}
	if s.offers {
		s.h.emit(OffersEnded{Peer: s.peer, Gen: s.gen})
	}
}

// Call asks for a session with this node's store, if there is none.
type Call struct{}

// Offer offers the store blocks that are in this node's memory: when it has come back.
type Offer struct{ Keys []core.Key }

func (Call) event()  {}
func (Offer) event() {}

type (
	// StoreUp says whether this node's store can be asked.
	StoreUp struct{ Up bool }
	// Offered says what a peer has for us, a store. OffersEnded: nothing more of it, it is gone.
	Offered struct {
		Peer PeerID
		Gen  kv.Generation
		Keys []core.Key
	}
	OffersEnded struct {
		Peer PeerID
		Gen  kv.Generation
	}
)

func (StoreUp) action()     {}
func (Offered) action()     {}
func (OffersEnded) action() {}
