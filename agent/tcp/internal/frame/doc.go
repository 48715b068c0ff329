// Package frame is the wire format of package tcp: pure encoders and strict decoders, one file per
// frame. All integers are little-endian.
//
//	header   ┌ kind 1 ┬ zero 3 ┬ length of body 4 ┐
//	body     │ by kind; exact: neither shorter nor longer than its fields say
//	payload  │ Chunk and Data only: bytes of KV, as many as the body says
//	trailer  └ Chunk and Data only: status 4, CRC32C of the payload 4
//
// Who dials is the poster; who listens owns the memory that is written or read. Stream 0 is the
// control stream, the others carry data:
//
//	dialer → listener, every stream first   Hello           answered by Welcome or Bye
//	dialer → listener, control              Notify, Begin, Cancel
//	dialer → listener, data                 Chunk + payload, Fetch
//	listener → dialer, control              Cancelled
//	listener → dialer, data                 Ack, Data + payload
//	listener → dialer, any                  Done, Refused, Bye
//
// A WRITE is a Begin and its Chunks, which may arrive in any order on several streams. A READ is
// Fetches, each answered on its own stream by one Data or Refused, in order. Ids of transfers rise
// with every transfer of a session, so that the listener knows a finished one from a new one
// without remembering it.
package frame
