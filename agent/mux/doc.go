// Package mux makes one agent.Agent out of several over one memory, and chooses for every peer which
// of them serves it.
//
//	               ┌──────────── Mux ────────────┐
//	AddPeer ─────> │ choose: setting, host, order│ ──> Peer{Transport, Why}
//	Post, Notify ─>│ route by the id's class     │
//	               └──┬───────────────────────┬──┘
//	              backend 0 (shm)         backend 1 (tcp)
//	              Alloc: home of memory   the same memory, registered
//	                  └── events ──┬──────────┘
//	                               pumps ─> one queue ─> Events
//
// # Choice
//
// With the setting Auto the first backend, in the order given, that both sides have and that reaches
// the peer is tried; backends for one host reach only peers of it. If it cannot admit the peer, the
// next is tried, and Why says so. Any other setting names the one transport that is used and
// offered.
//
// # Ids
//
// All backends have one common Name, so that a grant for a peer holds whichever way it comes; a grant
// has one id in all of them. The ids of peers, lists and transfers are those of the backend times the
// number of classes plus the backend's place: no table, no collision, and each tells where it
// belongs. A list of own memory is prepared in every backend at once, not when it is first needed:
// a list is bound to the registration of its memory, which may by then be another.
//
// # Events
//
// One goroutine per backend moves its events into a queue that never blocks: the slots of results
// are reserved by Post here, notifications are bounded per peer here. So no backend delays another,
// and the reader of Events delays none.
package mux
