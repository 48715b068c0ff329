package p2p

import "time"

const (
	// receivedMessages wait for the loop; behind them the ROUTER's own bounds hold each sender.
	receivedMessages = 64

	// drainMessages is how many messages are taken at most before the end of a link is told: more than
	// all links together usually hold, so that its last message comes first.
	drainMessages = 64 << 10

	// sendMessages and sendBytes wait for one peer to read. A peer beyond is not reading: its session
	// ends, and nobody else is delayed.
	sendMessages = 1024
	sendBytes    = 64 << 20

	// hangUpTime is how long the last messages to a peer may take.
	hangUpTime = time.Second

	// dialTimeout bounds a connection and its greeting; the session's handshake is bounded apart.
	dialTimeout = 10 * time.Second

	// admitTimeout bounds the admission of one peer by the agent.
	admitTimeout = 20 * time.Second

	// closeTime is how long Close waits for transfers that the agent does not stop.
	closeTime = 10 * time.Second

	// Heartbeats, where they are wanted, with stock's bounds (p2p-tier.md, section 2.1).
	pingTimeout = 10 * time.Second
	pingTTL     = 10 * time.Second

	// A host that is gone is noticed by the kernel: after 20 s of silence, or when what was sent is not
	// acknowledged for as long as stock waits for a PONG. The last also bounds how long a peer that stands still may
	// leave us with a full socket.
	keepAliveIdle  = 10 * time.Second
	keepAliveEvery = 5 * time.Second
	keepAliveTries = 2
	unackedTimeout = 10 * time.Second

	// defaultSilence bounds the time without progress of a transfer.
	defaultSilence = 30 * time.Second

	// checkShareDiv: one part in this many of the cores may compute checksums of what peers wrote; the rest
	// is the engine's.
	checkShareDiv = 2

	// offeredAgain bounds the blocks that are offered to a store that has come back: what it takes of one peer's
	// offers at a time.
	offeredAgain = 2048

	// waitingPosts bounds the transfers that wait for a place in the agent.
	waitingPosts = 4096
)
