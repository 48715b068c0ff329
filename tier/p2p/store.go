package p2p

import (
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// Peer is one session with a peer.
type Peer struct {
	ID  session.PeerID
	Gen kv.Generation
}

// Source names the peer to a request.
func (p Peer) Source(kvRequestID string) *tier.Source {
	i := strings.LastIndexByte(string(p.ID), ':')
	port, _ := strconv.Atoi(string(p.ID[i+1:])) // a PeerID has one
	return &tier.Source{Host: string(p.ID[:i]), Port: port, KVRequestID: kvRequestID}
}

// Taker is told what peers offer to this node, a store. Its methods are called on the loop's goroutine:
// they must not block. Ended says that the session is over and offers nothing more.
type Taker interface {
	Offered(Peer, []core.Key)
	Ended(Peer)
}

// storeSource is this node's store as the source of one more request; nil if it has none, or none that
// can be asked now. Then it is called, for later ones.
func (t *Tier) storeSource() *tier.Source {
	if t.cfg.Store == "" {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.mu.storeUp {
		t.postLocked(session.Call{})
		return nil
	}
	t.mu.storeIDs++
	return Peer{ID: session.PeerID(t.cfg.Store)}.Source(t.ownID + "-" + strconv.FormatUint(t.mu.storeIDs, 10))
}

func (t *Tier) setStore(up bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.storeUp = up
}

// StoreUp reports whether this node's store can be asked.
func (t *Tier) StoreUp() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.storeUp
}
