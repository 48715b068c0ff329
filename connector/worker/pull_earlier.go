package worker

import (
	"fmt"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/wire"
)

// expiryMargin is how long before D gives its blocks back P does not begin to read them any more: time
// for the READ, and for what the clocks' offset is wrong by (nixl-connector.md, section 6.1).
const expiryMargin = 5 * time.Second

// lender is what the peer of a fetch is: P reads from D what that kept of an earlier turn, else D from P.
func (f *fetch) lender() string {
	if f.want.Earlier {
		return "decode"
	}
	return "prefill"
}

// reader is what the peer of a claim is.
func (h *hold) reader() string {
	if h.earlier {
		return "prefill"
	}
	return "decode"
}

// shares tells whether a claim is of the first tokens of what D keeps for the next turn: all of them, or
// those of some blocks. Without digests nothing is.
func (h *hold) shares(c *wire.Claim, l geometry.Layout) bool {
	size := l.BlockSize * max(l.Ratio, 1)
	whole := c.Tokens / size
	switch digest := connector.Digest(c.Digest); {
	case digest == connector.Digest{}:
		return false
	case c.Tokens == h.have.NumTokens:
		return digest == h.identity.digest
	case c.Tokens%size != 0 || whole < 1 || whole > len(h.prefixes):
		return false
	default:
		return digest == h.prefixes[whole-1]
	}
}

// left is how long D still keeps the blocks, by the offset of the clocks that the handshake has found;
// ok is false if D has not said.
func (m *machine) left(f *fetch) (left time.Duration, ok bool) {
	if f.want.Expiry == nil {
		return 0, false
	}
	const most = 1 << 32 // seconds: what any clock says fits a Duration
	s := f.remote.clock.Local(*f.want.Expiry) - m.cfg.Clock(m.now)
	return time.Duration(max(-most, min(s, most)) * float64(time.Second)), true
}

// tooLate tells whether D's blocks must not be read any more.
func (m *machine) tooLate(f *fetch) bool {
	left, ok := m.left(f)
	return ok && left <= expiryMargin
}

// declineFetch gives up a read that comes too late: no transfer has failed, but a lease has ended and
// the KV does not come.
func (m *machine) declineFetch(f *fetch) {
	left, _ := m.left(f)
	left = max(left, 0)
	f.late = true
	m.stats.ReadsDeclined++
	m.failFetch(f, connector.PhaseLease, fmt.Sprintf("the decode engine keeps it for %v more; a read is begun only if that is more than %v",
		left.Round(time.Millisecond), expiryMargin))
}

// mayBeStale tells whether a READ from D that ended well may have brought another request's bytes: a
// stock D refuses nothing, so that it must have ended before D gave the blocks back. One that has not said
// when is believed.
func (m *machine) mayBeStale(f *fetch) bool {
	left, ok := m.left(f)
	return ok && f.remote.stock && left <= f.remote.clock.RTT/2
}
