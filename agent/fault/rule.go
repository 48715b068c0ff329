package fault

import (
	"bytes"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/agent"
)

// Point is a place where faults happen: a call of the user, or an event of the inner agent.
type Point uint8

const (
	OnPost Point = iota
	OnNotify
	OnAddPeer
	OnResult
	OnStopped
	OnNotification
	OnPeerLost
)

// Action is what a rule does.
type Action uint8

const (
	// Fail makes Post, Notify or AddPeer return an error, or a done Result a failed one.
	Fail Action = iota
	// Delay lets it happen Rule.Delay later. A delayed Post is accepted at once.
	Delay
	// Drop loses it without a word. A dropped transfer runs into its bound of silence.
	Drop
	// Stall is a transfer that never moves (as Drop), or an AddPeer that blocks until its context
	// ends.
	Stall
	// Duplicate makes it happen twice.
	Duplicate
	// Reorder holds it until the next of the same kind with the same peer has passed, or for
	// Rule.Delay (default 50 ms) if none comes.
	Reorder
	// Cut loses the peer: as if its connection had been reset before this happened.
	Cut
	// WriteLate reports a transfer as failed at once and starts it Rule.Delay later all the same.
	// Its Stopped comes when it has really stopped.
	WriteLate
)

var allowed = map[Point][]Action{
	OnPost:         {Fail, Delay, Drop, Stall, Cut, WriteLate},
	OnNotify:       {Fail, Delay, Drop, Duplicate, Reorder, Cut},
	OnAddPeer:      {Fail, Delay, Stall},
	OnResult:       {Fail, Delay, Cut},
	OnStopped:      {Delay},
	OnNotification: {Delay, Drop, Duplicate, Reorder, Cut},
	OnPeerLost:     {Delay},
}

// Occasion is one thing that happens at a point. Fields that the point does not have are zero.
type Occasion struct {
	Point   Point
	Peer    agent.Name // empty at OnAddPeer: it is not known yet
	Op      agent.Op   // OnPost
	Msg     []byte     // the notification, alone or attached
	Outcome agent.Outcome
}

// Match selects occasions. Zero fields match everything.
type Match struct {
	On     Point
	Peer   agent.Name
	Prefix string // of the notification
	Where  func(Occasion) bool
}

func (m Match) matches(o Occasion) bool {
	return m.On == o.Point &&
		(m.Peer == "" || m.Peer == o.Peer) &&
		bytes.HasPrefix(o.Msg, []byte(m.Prefix)) &&
		(m.Where == nil || m.Where(o))
}

// Rule is one fault.
type Rule struct {
	Match  Match
	Do     Action
	Delay  time.Duration // Delay, Reorder, WriteLate
	After  int           // let so many matches pass first: 2 = begin with the third
	Times  int           // act so often at most; 0 = without bound
	Chance float64       // of each match after that; 0 = always
	Err    error         // Fail, Cut: the cause; default ErrInjected
}

// validate reports a rule that cannot do what it says.
func (r Rule) validate() error {
	for _, do := range allowed[r.Match.On] {
		if do == r.Do {
			return nil
		}
	}
	return fmt.Errorf("fault: action %d does not apply at point %d", r.Do, r.Match.On)
}

// active is a rule with its counters. Guarded by Agent.mu.
type active struct {
	Rule
	seen, acted int
}

func (r *active) cause() error {
	if r.Err != nil {
		return r.Err
	}
	return ErrInjected
}

// decide is the rule that acts on an occasion, or nil. The caller holds mu.
func (a *Agent) decide(o Occasion) *active {
	for _, r := range a.mu.rules {
		if !r.Match.matches(o) {
			continue
		}
		r.seen++
		if r.seen <= r.After || r.Times > 0 && r.acted >= r.Times {
			continue
		}
		if r.Chance > 0 && a.mu.rand.Float64() >= r.Chance {
			continue
		}
		r.acted++
		return r
	}
	return nil
}
