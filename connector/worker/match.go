package worker

import (
	"slices"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
)

// matchKind says by what two sides are paired.
type matchKind uint8

const (
	byTransferBase   matchKind = iota // transfer id and base id
	byTransferDigest                  // transfer id and prompt
	byTransfer                        // transfer id, D does not tell the prompt
	byID                              // the same id on both sides
	byBaseDigest                      // base id and prompt
	byBase                            // base id
)

var matchNames = [...]string{"transfer_id", "transfer_id", "transfer_id", "id", "base_id", "base_id"}

func (k matchKind) String() string { return matchNames[k] }

// promptsDiffer refuses two requests of one name and unlike digests (connector.Digest).
const promptsDiffer = "the prompts differ in tokens, cache salt, adapter or extra keys"

// matchKey is one name under which a request can be found.
type matchKey struct {
	kind     matchKind
	bare     bool // only among requests without a transfer id
	blind    bool // only among requests that do not tell their prompt
	transfer kv.TransferID
	id       string
	digest   connector.Digest
}

// identity is what one side knows of a request: by it P's blocks and D's registration are paired.
//
// The order is transfer id, exact id, base id, each a hash lookup. Two different transfer ids are two
// different dispatches and never pair, whatever their other ids say: a router that tries again, or
// a client that uses an X-Request-Id twice, gets a new one. One dispatch may have several requests
// (several prompts, n > 1); the base id, which has the prompt's index, tells them apart, and where
// the legs have unlike base ids the prompt does.
type identity struct {
	transfer  kv.TransferID
	id        kv.RequestID
	digest    connector.Digest
	hasDigest bool // P always; D if it is a kvferry
}

// keys are the names under which a side is filed, so that the other side's lookups find it.
func (i identity) keys() []matchKey {
	id, base := string(i.id), string(i.id.Base())
	out := make([]matchKey, 0, 9)
	if i.transfer != "" {
		out = append(out, matchKey{kind: byTransferBase, transfer: i.transfer, id: base})
		if i.hasDigest {
			out = append(out, matchKey{kind: byTransferDigest, transfer: i.transfer, digest: i.digest})
		}
		out = append(out, matchKey{kind: byTransfer, transfer: i.transfer, blind: !i.hasDigest})
	}
	for _, bare := range []bool{false, true} {
		if bare && i.transfer != "" {
			break
		}
		out = append(out, matchKey{kind: byID, bare: bare, id: id})
		if i.hasDigest {
			out = append(out, matchKey{kind: byBaseDigest, bare: bare, id: base, digest: i.digest})
		}
		out = append(out, matchKey{kind: byBase, bare: bare, id: base})
	}
	return out
}

// lookups are the names to try on the other side, best first. A side with a transfer id finds by
// other ids only those without one.
func (i identity) lookups(other side) []matchKey {
	id, base := string(i.id), string(i.id.Base())
	out := make([]matchKey, 0, 6)
	bare := i.transfer != ""
	if i.transfer != "" {
		out = append(out, matchKey{kind: byTransferBase, transfer: i.transfer, id: base})
		if i.hasDigest {
			out = append(out, matchKey{kind: byTransferDigest, transfer: i.transfer, digest: i.digest})
		}
		// Where one side does not tell its prompt, the transfer id alone must do. P always tells.
		if !i.hasDigest || other == inRegistrations {
			out = append(out, matchKey{kind: byTransfer, transfer: i.transfer, blind: other == inRegistrations})
		}
	}
	out = append(out, matchKey{kind: byID, bare: bare, id: id})
	if i.hasDigest {
		out = append(out, matchKey{kind: byBaseDigest, bare: bare, id: base, digest: i.digest})
	}
	return append(out, matchKey{kind: byBase, bare: bare, id: base})
}

// side is which of the two tables is looked in.
type side uint8

const (
	inBlocks        side = iota // P's finished blocks, which always tell their prompt
	inRegistrations             // D's registrations, which may not
)

// endedKeys are the names under which an ended request of P is remembered, and ended the ones by
// which a registration finds it. The transfer id alone is not among them: another request of the
// same dispatch may be alive.
func (i identity) endedKeys() []matchKey { return named(i.keys()) }
func (i identity) ended() []matchKey     { return named(i.lookups(inRegistrations)) }

func named(keys []matchKey) []matchKey {
	return slices.DeleteFunc(keys, func(k matchKey) bool { return k.kind == byTransfer })
}
