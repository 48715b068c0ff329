package store

import "time"

const (
	// MaxNamespaces bounds Config.Namespaces: each costs an agent with its sockets and an equal share of
	// the memory.
	MaxNamespaces = 64

	// DefaultUnused is how long no engine may have been connected to a namespace without blocks that gives way
	// to another: long enough for all engines of a model to be restarted.
	DefaultUnused = time.Minute

	// peerShareDiv: one peer's lookups hold one part in this many of the blocks at most; all peers' leave
	// one part in intakeShareDiv for what comes in.
	peerShareDiv   = 2
	intakeShareDiv = 8

	// namedNamespaces bounds the namespaces that a refusal describes: one line of a log holds them, and
	// few stores have more.
	namedNamespaces = 4
	// namedLen bounds what is told of a fingerprint or hash seed, bytes: a SHA-256 in hexadecimal digits.
	namedLen = 64

	// maxRecordLen bounds namespace.json, bytes: its texts have at most a KiB each.
	maxRecordLen = 16 << 10
)
