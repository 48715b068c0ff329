package proxy

import (
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/proxy/core"
)

// What becomes of turns, as metric labels.
const (
	turnKept    = "kept"    // a decode engine keeps one of a conversation
	turnUsed    = "used"    // the conversation went on: a prefill engine was told
	turnDropped = "dropped" // nobody will: it is too old, the answer did not reach its client, or it is of no conversation
)

// turns is what the router remembers of conversations.
type turns struct {
	mu struct {
		sync.Mutex
		table *core.Turns
	}
}

func newTurns(ttl time.Duration) *turns {
	t := &turns{}
	t.mu.table = core.NewTurns(ttl)
	return t
}

func (t *turns) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.table.Len()
}

func (t *turns) take(now time.Time, c core.Conversation) (core.Turn, []core.Turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.table.Take(now, c)
}

// takeAll takes every turn out, the newest first: it would be kept longest.
func (t *turns) takeAll() []core.Turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.table.TakeAll()
}

func (t *turns) put(now time.Time, c core.Conversation, turn core.Turn) []core.Turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.table.Put(now, c, turn)
}

func (t *turns) forget(c core.Conversation, turn core.Turn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.table.Forget(c, turn)
}

// beginTurn takes what D kept of the conversation's last turn: it is for one request, and for one try.
func (q *request) beginTurn() {
	if q.conversation == (core.Conversation{}) {
		return
	}
	var dropped []core.Turn
	q.earlier, dropped = q.r.turns.take(time.Now(), q.conversation)
	q.r.dropTurns(dropped...)
	if !q.plan.Disaggregate && q.earlier.Kept() { // D serves it alone
		q.r.dropTurns(q.earlier)
		q.earlier = core.Turn{}
	}
	if q.earlier.Kept() {
		q.r.metrics.turn(turnUsed)
	}
}

// keep remembers what D says that it keeps of this turn, before the client knows that its answer is whole:
// the next turn may be here at once.
func (q *request) keep(t core.Turn) {
	if !t.Kept() {
		return
	}
	t.Engine, t.Header = q.attempt.targets[core.Decode].name, q.r.clientKey(q.header)
	q.kept = t
	if q.conversation != (core.Conversation{}) {
		q.r.metrics.turn(turnKept)
		q.r.dropTurns(q.r.turns.put(time.Now(), q.conversation, t)...)
	}
}

// endTurn lets go what there will be no next turn for: the answer has not reached its client, or is of no
// conversation; and what P has not taken.
func (q *request) endTurn() {
	well := q.outcome.Failure == nil && (!q.outcome.ClientGone || q.told)
	if q.earlier.Kept() && (!well || q.outcome.Attempts > 1) {
		q.r.dropTurns(q.earlier)
	}
	if q.kept.Kept() && (q.conversation == (core.Conversation{}) || !well && q.r.turns.forget(q.conversation, q.kept)) {
		q.r.dropTurns(q.kept)
	}
}

// dropTurns tells the decode engines that nobody will ask for these, as far as they have said how, with the
// key of the client whose turn it was: whoever drops it may be another, or nobody. Nobody waits for it.
func (r *Router) dropTurns(turns ...core.Turn) {
	for _, t := range turns {
		r.metrics.turn(turnDropped)
		d := r.pools[core.Decode].named(t.Engine)
		if d == nil || !t.Releasable() {
			continue
		}
		r.letGo(d, t.ReleaseBody(), turnHeader(t), nil)
	}
}

// clientKey is of a client's headers what engines get that is not about one request: Authorization, and what
// the configuration passes on. It shares no memory with them.
func (r *Router) clientKey(header http.Header) map[string][]string {
	var key map[string][]string
	for _, name := range r.forward {
		if v := header[name]; len(v) > 0 && !slices.Contains(tracing, name) {
			if key == nil {
				key = map[string][]string{}
			}
			key[name] = slices.Clone(v)
		}
	}
	return key
}

// turnHeader is what a message about a turn has.
func turnHeader(t core.Turn) http.Header {
	h := http.Header{}
	for name, v := range t.Header {
		h[name] = v
	}
	h.Set("Content-Type", "application/json")
	h.Set("User-Agent", "kvferry-router")
	return h
}
