// Package events is the queue behind Agent.Events: one channel, on which no peer can block
// another's events and every Result and Stopped has its place from Post on.
//
//	Reserve ─ Result ─ Stopped ───┐                      ┌────────────┐
//	Peer.Notify (bounded share) ──┼─> backlog ─(pump)──> │ buffered   │ ──> reader
//	Peer.Lost (once) ─────────────┘   only when the      │ channel    │
//	                                  channel is full    └────────────┘
//
// The channel has room for every Result and Stopped that can be owed, so that Close never waits for
// the reader: what is owed stays in the closed channel to be read. What the reader has taken is
// seen from the channel's fill, so that bounds count what is unread and need no acknowledgement.
// The pump is a goroutine that lives only while there is a backlog; an idle queue has none.
package events
