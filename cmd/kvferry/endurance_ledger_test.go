package main

import (
	"fmt"
	"regexp"
	"strconv"
	"sync"

	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// ledger follows the events of one engine: what began must have ended, and what went wrong is kept for
// whoever knows the causes. Any goroutine emits.
type ledger struct {
	name string
	mu   struct {
		sync.Mutex
		count    map[string]int
		leases   map[kv.RequestID]bool // taken, not ended
		expired  []kv.RequestID
		failed   []event.ReceiveFailed
		received map[string]int // by transport
		stray    []string       // what cannot be
	}
}

func newLedger(name string) *ledger {
	l := &ledger{name: name}
	l.mu.count = map[string]int{}
	l.mu.leases = map[kv.RequestID]bool{}
	l.mu.received = map[string]int{}
	return l
}

// Emit is event.Sink's.
func (l *ledger) Emit(e event.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.count[e.Kind()]++
	switch e := e.(type) {
	case event.LeaseTaken:
		if l.mu.leases[e.Request] {
			l.mu.stray = append(l.mu.stray, fmt.Sprintf("the lease of %s was taken twice", e.Request))
		}
		l.mu.leases[e.Request] = true
	case event.LeaseEnded:
		if !l.mu.leases[e.Request] {
			l.mu.stray = append(l.mu.stray, fmt.Sprintf("the lease of %s ended (%s) and was never taken", e.Request, e.Reason))
		}
		delete(l.mu.leases, e.Request)
		l.mu.count["lease "+e.Reason]++
		if e.Reason == "expired" {
			l.mu.expired = append(l.mu.expired, e.Request)
		}
	case event.TransferFailed:
		l.mu.count["failed in "+e.Phase]++
	case event.ReceiveFailed:
		l.mu.failed = append(l.mu.failed, e)
	case event.ReceiveFinished:
		l.mu.received[e.Transport]++
	}
}

// balance says what began and has not ended.
func (l *ledger) balance() (open []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	open = append(open, l.mu.stray...)
	for id := range l.mu.leases {
		open = append(open, fmt.Sprintf("the lease of %s has not ended", id))
	}
	c := l.mu.count
	for _, pair := range []struct {
		what       string
		begun, end int
	}{
		{"transfers without a Stopped", c["transfer_posted"], c["transfer_stopped"]},
		{"transfers without a Result", c["transfer_posted"], c["transfer_done"] + c["failed in transfer"]},
		{"grants that were not revoked", c["grant_issued"], c["grant_revoked"]},
		{"quarantines that have not ended", c["blocks_quarantined"], c["quarantine_ended"]},
	} {
		if pair.begun != pair.end {
			open = append(open, fmt.Sprintf("%s: %d of %d", pair.what, pair.begun-pair.end, pair.begun))
		}
	}
	for i := range open {
		open[i] = l.name + ": " + open[i]
	}
	return open
}

var enduranceID = regexp.MustCompile(`q(\d+)\.`)

// numberOf is the request of the run that an engine's request is of; -1: none.
func numberOf(id kv.RequestID) int {
	m := enduranceID.FindStringSubmatch(string(id))
	if m == nil {
		return -1
	}
	n, _ := strconv.Atoi(m[1])
	return n
}
