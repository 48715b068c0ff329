// Package tcp is a transfer agent over TCP, for any two hosts. Bytes go from registered memory into
// the sockets and from the sockets straight into place; nothing is copied in between.
//
//	poster (dials)                                       owner of the memory (listens)
//	Post ─> link ─┬─ control writer ── Notify, Begin, Cancel ──> control goroutine ─> Events
//	              ├─ stream writer 1 ─ Chunk + payload, Fetch ─> stream goroutine 1 ─> memory
//	              ├─ stream reader 1 <─ Ack, Done, Refused, Data + payload ─ (the same)
//	              ├─ stream writer 2 …                            stream goroutine 2
//	              └─ control reader <─ Cancelled …
//
// # A WRITE
//
// The poster cuts it into chunks; every stream of the link takes the next chunk of the transfer
// whose turn it is, so that transfers to one peer share its streams chunk by chunk. Before the
// listener reads a chunk's payload it checks that the grant lives, is this peer's, permits writing
// and includes every range. It reads with calls that never wait, each into at most 256 KiB of the
// destination, and holds the grant for such a call only: Revoke waits for one of them at most. What
// comes after a revocation is read into scratch. Each payload is followed by its CRC32C. When every
// chunk is in place, the notification is delivered and Done is sent.
//
// # A READ
//
// The poster sends Fetches on its streams, a few ahead; the listener checks the read grant and
// answers each with the bytes, read from memory under the grant in the same way. The poster
// receives them straight into place.
//
// # The end of a transfer
//
// Every transfer has one timer for its silence; acknowledged chunks and moved bytes are progress.
// When it ends before it is done (silence, Cancel) the poster stops reading its memory at once, and
// a WRITE is Stopped when the listener has answered Cancel, or when the connections are closed:
// which they are if it does not answer within Config.AbortTimeout. Everything else on such a link
// ends as peer lost.
//
// # Who owns what
//
// A link (poster's side) has a mutex for its transfers and queues, two goroutines for the control
// stream and two for each data stream. A session (listener's side) has a mutex for its incoming
// WRITEs and one goroutine per stream. Both wait in the kernel when idle; there are no timers then.
// Peers share nothing but the agent's tables, so that a mute one delays nobody. A connection that
// breaks is noticed at once; a host that vanishes by the kernel's keepalive and TCP_USER_TIMEOUT.
//
// The frames are described in internal/frame. There is no encryption and a peer's name is not
// proven: what protects memory is that a grant's id cannot be guessed. Use it in networks where
// nobody listens in.
package tcp
