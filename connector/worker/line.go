package worker

import (
	"container/list"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector/internal/deadline"
)

// line is the transfers that the agent had no room for, in a queue for each peer. A peer that never has
// room keeps its own transfers waiting and nobody else's: in a round the first of every queue is handed
// to the agent once, and once more after each success. Only one is with the agent at a time.
//
//	turns:  q.0 ──> r.0 ──> s.0 ──> (q.0 …)
//	         1       2       3
//	         4               5
type line struct {
	queues map[agent.Name]*queue
	turns  list.List // of *queue that are not empty, the next one first
	places map[uint64]place
	flying map[agent.Name]int // transfers that have not stopped
	trying uint64             // is with the agent; 0 is none
	left   int                // turns left in this round
	timer  deadline.Item[any]
}

// queue is what waits for room at one peer; it holds serials.
type queue struct {
	name agent.Name
	list list.List
	turn *list.Element
}

type place struct {
	queue *queue
	elem  *list.Element
}

func (l *line) init(timer any) {
	l.queues = make(map[agent.Name]*queue)
	l.places = make(map[uint64]place)
	l.flying = make(map[agent.Name]int)
	l.timer.Value = timer
}

// Len is how many wait.
func (l *line) Len() int { return len(l.places) }

// waits tells whether something waits for this peer.
func (l *line) waits(name agent.Name) bool { return l.queues[name] != nil }

func (l *line) queue(name agent.Name) *queue {
	q := l.queues[name]
	if q == nil {
		q = &queue{name: name}
		q.turn = l.turns.PushBack(q)
		l.queues[name] = q
	}
	return q
}

// enter puts a transfer behind those to its peer.
func (l *line) enter(name agent.Name, serial uint64) {
	q := l.queue(name)
	l.places[serial] = place{q, q.list.PushBack(serial)}
}

// back puts one that the agent had no room for before those to its peer.
func (l *line) back(name agent.Name, serial uint64) {
	q := l.queue(name)
	l.places[serial] = place{q, q.list.PushFront(serial)}
}

// leave takes a transfer out that waits, if it does.
func (l *line) leave(serial uint64) {
	p, ok := l.places[serial]
	if !ok {
		return
	}
	delete(l.places, serial)
	if p.queue.list.Remove(p.elem); p.queue.list.Len() == 0 {
		l.turns.Remove(p.queue.turn)
		delete(l.queues, p.queue.name)
	}
}

// round lets every queue have a turn.
func (l *line) round() { l.left = l.turns.Len() }

// answered takes the agent's answer to one whose turn it was, and tells whether it was that. Where there
// was room there may be more.
func (l *line) answered(serial uint64, name agent.Name, busy bool) bool {
	if l.trying == 0 || l.trying != serial {
		return false
	}
	l.trying = 0
	if !busy && l.waits(name) {
		l.left++
	}
	return true
}

// keep queues a transfer that the agent had no room for: where it was, or behind those to its peer.
func (l *line) keep(name agent.Name, serial uint64, tried bool) {
	if tried {
		l.back(name, serial)
	} else {
		l.enter(name, serial)
	}
}

// next takes the transfer out whose turn it is; false if the round is over.
func (l *line) next() (uint64, bool) {
	if l.trying != 0 || l.left <= 0 || l.turns.Len() == 0 {
		return 0, false
	}
	l.left--
	front := l.turns.Front()
	q := front.Value.(*queue)
	l.turns.MoveToBack(front)
	l.trying = q.list.Front().Value.(uint64)
	l.leave(l.trying)
	return l.trying, true
}

// posted and stopped follow the transfers under way.
func (l *line) posted(name agent.Name) { l.flying[name]++ }

func (l *line) stopped(name agent.Name) {
	if l.flying[name]--; l.flying[name] == 0 {
		delete(l.flying, name)
	}
}

// blind tells whether something waits for a peer with which nothing is under way whose end would tell of
// room.
func (l *line) blind() bool {
	for name := range l.queues {
		if l.flying[name] == 0 {
			return true
		}
	}
	return false
}

// clear forgets what waits.
func (l *line) clear() {
	l.turns.Init()
	clear(l.queues)
	clear(l.places)
	l.trying, l.left = 0, 0
}

// leaveLine takes a transfer out that ends while it waits.
func (m *machine) leaveLine(l *line, serial uint64) {
	if l.leave(serial); l.Len() == 0 {
		m.timers.Remove(&l.timer)
	}
}

// watchLine arms the timer of a line whose round is over, if nothing else would begin the next.
func (m *machine) watchLine(l *line) {
	if l.trying != 0 {
		return // its answer comes here again
	}
	_, armed := l.timer.At()
	switch blind := !m.closing && l.blind(); {
	case !blind:
		m.timers.Remove(&l.timer)
	case !armed:
		m.timers.Set(&l.timer, m.now.Add(busyRetry))
	}
}
