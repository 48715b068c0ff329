// Package zmtp speaks ZMTP 3.1 (and 3.0) with the NULL mechanism: the wire protocol of ZeroMQ over TCP, for
// the three socket types that kvferry needs. REQ asks the side channel of a peer, ROUTER answers it and
// receives the control messages of the P2P tier, DEALER sends those. The other end may be libzmq.
//
// What sets it apart from a general ZeroMQ library: every byte from a stranger is bounded before it is
// believed. Memory follows what has arrived, never what a length field announces; a client that is mute,
// slow or hostile is dropped after a stated time and delays nobody; nothing runs after Close.
//
//	            +----------- link (one TCP connection) -----------+
//	net.Conn -> | reader goroutine: handshake, frames, PING, TTL  | -> share --+
//	net.Conn <- | writer goroutine: greeting, PONG, sendQueue     |            |
//	            +-------------------------------------------------+            v
//	Send(peer) --> sendQueue (bounded; overflow drops the link)        fairQueue --> Recv
//	                                                              (one turn per connection)
//
// # Who owns what
//
// A link is owned by its reader goroutine, which starts it, reads it and reports its end. The writer
// goroutine owns the sending half of the connection. Both end when the link is killed, which anyone may do.
// A [Router] owns its listener and its links; a [Req] or [Dealer] owns one link. Close waits for all
// goroutines of its socket. An idle socket has no timer and wakes nobody, unless heartbeats were asked for.
//
// # Differences from libzmq, on purpose
//
//   - A Req or Dealer is one connection: it does not reconnect. Its end is visible (Done, Err) and the caller
//     dials again.
//   - A Req whose reply did not come in time is closed, as a late reply could be taken for the next one.
//   - A second connection with the identity of a live one is refused, as by libzmq (no handover), but it is
//     closed before READY, so that libzmq keeps its queue and dials again; libzmq itself leaves it open and
//     mute. It first waits a moment for the old connection's end, so that close and dial back to back works.
//   - An identity that begins with a zero byte is refused: those are the names that a ROUTER invents.
//   - A peer that breaks a rule is told which with an ERROR command, also after the handshake.
//   - Messages that a closed connection had delivered are still received. Each [Message] carries the
//     generation of its connection; two generations of one identity are not ordered between each other.
package zmtp
