package peer

import (
	"time"

	"github.com/kvferry/kvferry/wire"
)

const (
	// DefaultQueryTimeout bounds the dial and each question of a handshake: what stock clients wait
	// (nixl-connector.md, section 2.1).
	DefaultQueryTimeout = 5 * time.Second
	// DefaultHandshakeTimeout bounds a whole handshake, waiting for a slot included, however many
	// ranks there are and however slowly each of them answers.
	DefaultHandshakeTimeout = 30 * time.Second
	// DefaultTTL is how long a peer stays connected without use (engine_ttl of stock).
	DefaultTTL = time.Hour
	// DefaultMaxParallel bounds the sockets that a burst of new peers opens at once.
	DefaultMaxParallel = 64
	// DefaultMaxPeers bounds connected engines. Fleets have hundreds; when the table is full the
	// least recently used one makes room, and if all have work in flight the handshake fails.
	DefaultMaxPeers = 4096

	// maxFlights bounds handshakes in flight that our own work needs, mute ones included: each may hold a
	// socket. Beyond it the host with most of them makes room, else what is beyond fails at once.
	maxFlights = 1024
	// maxAsked bounds those that peers made us begin to have an answer, in the same way for each agent. It
	// is apart: strangers choose the names and addresses.
	maxAsked = 256

	// slotPatience is how long a handshake may hold a slot. A healthy peer answers in milliseconds;
	// a mute one must not hold what others wait for.
	slotPatience = 250 * time.Millisecond
	// maxWaiters bounds the callers that wait for one handshake; an engine has fewer requests.
	maxWaiters = 1 << 16
	// maxRanks bounds the ranks asked in one handshake: no engine has more shards.
	maxRanks = 1024
	// maxAddrs bounds the addresses under which one connected engine is known. One engine has a
	// name or two per network; the oldest is forgotten.
	maxAddrs = 8
	// maxEarlyLosses bounds the losses remembered for a handshake that is adding agents. Past it
	// the handshake fails, since one of its own may be among them.
	maxEarlyLosses = 1024

	// maxReplyFrames: a good answer has two frames after the delimiter; a few more can be named.
	maxReplyFrames = 8

	// maxRequest bounds a message that a client of the listener may send, delimiter included; the
	// decoder is stricter still.
	maxRequest = wire.MaxHandshakeRequest + 64
	// maxRequestFrames: a good request has two frames; a few more can be named in the warning.
	maxRequestFrames = 8
	// maxWaitingReplies bounds answers queued for one client: an honest one waits for each.
	maxWaitingReplies = 4
	// maxServedRanks bounds the ranks of one listener: TP × PP of the largest engine.
	maxServedRanks = 4096
	// warnEvery and warnBurst limit warnings about bad requests, so that a port scanner cannot
	// fill a log: warnBurst at once, then one per warnEvery.
	warnEvery = 10 * time.Second
	warnBurst = 5
)
