package session

import "time"

// silence watches a peer that owes an answer: a process that stands still keeps its connections, and the
// deadlines of what was asked are long. When it says nothing for a while it is asked for a sign of life, which
// its transport gives however busy its engine is; without one the session ends. While nothing is owed there is no
// timer.
type silence struct {
	timer  *timer
	last   time.Time // something came, or the watch began
	probed bool
}

func (w *silence) heard(now time.Time) { w.last, w.probed = now, false }

// expect begins the watch: an answer is due.
func (s *session) expect() {
	if s.silence.timer != nil {
		return
	}
	s.silence.heard(s.h.now)
	s.silence.timer = s.h.after(probeAfter, s.listen)
}

// expectNothing ends it.
func (s *session) expectNothing() {
	s.h.stop(s.silence.timer)
	s.silence.timer = nil
}

func (s *session) listen() {
	w, h := &s.silence, s.h
	w.timer = nil
	if !s.client.owed() {
		return
	}
	wait := probeAfter
	switch silent := h.now.Sub(w.last); {
	case silent < probeAfter:
		wait -= silent
	case w.probed:
		s.lost(Silent, "it owes an answer, and gives no sign of life")
		return
	default:
		w.probed = true
		h.emit(Probe{Peer: s.peer, Gen: s.gen})
	}
	w.timer = h.after(wait, s.listen)
}

// owed reports whether the peer is to answer something.
func (c *clientRole) owed() bool {
	for _, t := range c.txs {
		if t.fenced || len(t.loads) > 0 || t.unanswered() {
			return true
		}
	}
	return false
}
