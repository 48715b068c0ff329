package session

import (
	"time"

	"github.com/kvferry/kvferry/wire"
)

const (
	// maxTransactions bounds the ids of one session that this node asks under, with those that wait for
	// a late answer.
	maxTransactions = 4096
	// maxLookups bounds the lookups of one peer that wait for an answer; more are answered with misses.
	maxLookups = 256
	// maxKeys bounds the keys in one peer's lookups that wait for an answer, and in its fetches that are not over: two of
	// the largest messages. More lookups are answered with misses, more fetches refused.
	maxKeys = 2 * wire.MaxP2PKeys
	// maxRounds bounds a peer's rounds with something to write or to wait for.
	maxRounds = 4096
	// maxExpired bounds the rounds remembered whose pins were given back.
	maxExpired = 1024
	// maxQueued bounds the messages that wait for a handshake. They are answers, and aborts.
	maxQueued = 1024
	// maxBadKeys is how many messages in a row with unusable keys end a session, as with stock.
	maxBadKeys = 5
	// maxBindings bounds the ids under which this node prefills for others.
	maxBindings = 65536
	// maxLinks bounds the connections remembered as dropped, whose last messages may still come in. When
	// it is reached they are forgotten: such a message is then refused once more.
	maxLinks = 4096
	// maxPastPeers bounds the peers without a session whose counters are kept apart.
	maxPastPeers = 128
	// maxPauses bounds the peers remembered for redialPause.
	maxPauses = 1024

	// maxOfferKeys bounds the keys of one offer; more are sent as several. A prompt of 16 Ki tokens in
	// blocks of 16.
	maxOfferKeys = 1024
	// minStorePause to maxStorePause lie between the end of a session with this node's store and the next
	// dial, twice as long each time that none comes about. A request or an offer makes the dial: a node
	// with nothing to do does not wake up for a store that is away.
	minStorePause = time.Second
	maxStorePause = 30 * time.Second

	// probeAfter is how long a peer that owes an answer may say nothing before it is asked for a sign of life, and how
	// long that may take: as long together as a stock peer waits for a PONG.
	probeAfter = 5 * time.Second

	// fetchFollows is how long the fetch of a hit may take to follow: an engine asks for it at once, or not at all.
	fetchFollows = 2 * time.Second

	// unheardShareDiv: peers that requests have named and that have not answered yet have one part in this many of the
	// places, and one more: whoever may send requests cannot drive all others out by naming nobodies.
	unheardShareDiv = 2

	// siblingGrace is how long the other ranks of a process may be silent after one was lost.
	siblingGrace = 2 * time.Second

	// redialPause lies between the end of a connection and the next to the same peer: libzmq ignores a
	// connection whose identity it still knows (p2p-tier.md, section 2.1).
	redialPause = 500 * time.Millisecond
)

// DefaultPortion is for how many keys of one peer's lookup the tier's lock is held at a time, in which the engine and all
// other peers wait: some tenths of a millisecond if all are hits, one or two if each is loaded from another tier. A
// prompt of 16 Ki tokens, in blocks of 16, is one portion; the longest lookup, of 128 Ki keys, is 128.
const DefaultPortion = 1024

// Defaults of Config. Those with a number in p2p-tier.md have its value.
const (
	DefaultMaxPeers         = 128
	DefaultHandshakeTimeout = 30 * time.Second
	DefaultIdleTimeout      = 300 * time.Second
	// DefaultLookupTimeout is more than what a stock peer may take (5 s for blocks being written, and a
	// step or two), and little against computing a long prompt.
	DefaultLookupTimeout = 10 * time.Second
	DefaultLoadTimeout   = 30 * time.Second
	// DefaultLoadRate is added to the load's deadline, bytes a second: slower is no use.
	DefaultLoadRate       = 100 << 20
	DefaultPinTimeout     = 30 * time.Second
	DefaultPendingTimeout = 5 * time.Second
	DefaultDemandTimeout  = 60 * time.Second
	DefaultUnboundTimeout = 60 * time.Second
	DefaultRememberFor    = 60 * time.Second
)
