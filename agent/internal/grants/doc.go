// Package grants keeps the permissions that an agent has given to peers, and makes their end exact.
//
//	Add ─> Grant (merged ranges, gate) ── Find by (id, peer, access) ── Covers ── Enter … Leave
//	                                 Revoke: shuts the gate, waits for one bounded copy at most
//
// A Table may be used from any goroutine. Nothing here waits for a peer.
package grants
