package engine

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/engine/core"
)

// tellTier passes an action for the CPU tier on. What waits in its mailbox is bounded by the live
// requests and by the blocks of the KV cache.
func (l *loop) tellTier(a core.Action) {
	switch a := a.(type) {
	case core.TierBegin:
		r := l.live[a.ID]
		l.tiered[a.Seq] = r
		l.e.parts.tier.commands.put(tierBegin{seq: a.Seq, req: tierRequestOf(a.Seq, &r.Tier)})
	case core.TierEnd:
		delete(l.tiered, a.Seq)
		l.e.parts.tier.commands.put(a)
	case core.TierLook, core.TierForget, core.TierLoad, core.TierStore, core.TierReset:
		l.e.parts.tier.commands.put(a)
	}
}

// tierNews takes what the tier has to say.
func (l *loop) tierNews() {
	for _, ev := range l.e.parts.tier.events.take() {
		if r := l.tiered[ev.seq]; r != nil && len(ev.tokens) > 0 && r.tierTokens == nil {
			r.tierTokens = ev.tokens
		}
		l.step(ev.event)
	}
}

// tierText is how the log line says from which tiers tokens came.
func tierText(tokens map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(tokens)) {
		parts = append(parts, name+"="+strconv.Itoa(tokens[name]))
	}
	return strings.Join(parts, ",")
}
