package scheduler

import (
	"slices"
	"strings"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// heartbeats is the requests of D that wait for a prefill engine. The zero value is empty.
type heartbeats struct {
	waiting map[*request]struct{}
	changed bool // since the last groups
}

func (b *heartbeats) add(q *request) {
	if b.waiting == nil {
		b.waiting = make(map[*request]struct{})
	}
	b.waiting[q] = struct{}{}
	b.changed = true
}

func (b *heartbeats) remove(q *request) {
	if _, ok := b.waiting[q]; ok {
		delete(b.waiting, q)
		b.changed = true
	}
}

// groups is the whole set, one group per peer address in a stable order. A request is named in
// every way in which P may know it: by the router's id (P's own id in a sequential hand-off, the
// raw X-Request-Id with concurrent legs), by the transfer id, and by D's id, whose base P shares
// (nixl-connector.md, section 7.8). Ids shared by several requests are named once and stay while
// one of them waits.
func (b *heartbeats) groups() []connector.HeartbeatGroup {
	b.changed = false
	ids := make(map[connector.PeerAddr][]kv.RequestID)
	for q := range b.waiting {
		for _, id := range []kv.RequestID{q.remote, kv.RequestID(q.transfer), q.id} {
			if nameable(id) {
				ids[q.peer] = append(ids[q.peer], id)
			}
		}
	}
	out := make([]connector.HeartbeatGroup, 0, len(ids))
	for peer, list := range ids {
		slices.Sort(list)
		out = append(out, connector.HeartbeatGroup{Peer: peer, IDs: slices.Compact(list)})
	}
	slices.SortFunc(out, func(a, c connector.HeartbeatGroup) int {
		if d := strings.Compare(string(a.Peer.Engine), string(c.Peer.Engine)); d != 0 {
			return d
		}
		if d := strings.Compare(a.Peer.Host, c.Peer.Host); d != 0 {
			return d
		}
		return a.Peer.Port - c.Peer.Port
	})
	return out
}

// nameable tells whether an id survives a heartbeat, which joins ids with commas.
func nameable(id kv.RequestID) bool { return id != "" && !strings.Contains(string(id), ",") }
