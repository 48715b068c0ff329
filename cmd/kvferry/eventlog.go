package main

import (
	"context"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/peer"
)

const (
	// eventQueue bounds the events that wait to be logged; what comes on top is dropped and counted,
	// since an emitter must not wait for a log.
	eventQueue = 1024
	// warnBurst and warnEvery bound the warnings of one kind: a stranger who causes them must not fill
	// the log.
	warnBurst = 5
	warnEvery = 10 * time.Second
)

// eventLog writes typed events to the log: faults as warnings, at a bounded rate for each kind, and
// the rest at debug level. One goroutine writes; Emit never blocks.
type eventLog struct {
	log   *slog.Logger
	store string // of this engine; "": none
	queue chan event.Event
	done  chan struct{}

	storeAway bool // the log has said so; the goroutine's

	mu struct {
		sync.Mutex
		closed  bool
		dropped int
	}
}

func newEventLog(log *slog.Logger, store string) *eventLog {
	l := &eventLog{log: log, store: store, queue: make(chan event.Event, eventQueue), done: make(chan struct{})}
	go l.run()
	return l
}

// Emit is event.Sink's.
func (l *eventLog) Emit(e event.Event) {
	if !isFault(e) && !l.ofStore(e) && !l.log.Enabled(context.Background(), slog.LevelDebug) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return
	}
	select {
	case l.queue <- e:
	default:
		l.mu.dropped++
	}
}

// Close writes what is queued and ends the goroutine.
func (l *eventLog) Close() {
	l.mu.Lock()
	if !l.mu.closed {
		l.mu.closed = true
		close(l.queue)
	}
	l.mu.Unlock()
	<-l.done
}

func (l *eventLog) run() {
	defer close(l.done)
	rates := map[string]*rate{}
	for e := range l.queue {
		if l.ofStore(e) && l.logStore(e) {
			continue
		}
		if n := l.takeDropped(); n > 0 {
			l.log.Warn("events were not logged: they came faster than the log takes them", "events", n)
		}
		if !isFault(e) {
			l.log.Debug(e.Kind(), attributes(e)...)
			continue
		}
		r := rates[e.Kind()] // as many as there are kinds
		if r == nil {
			r = &rate{}
			rates[e.Kind()] = r
		}
		if suppressed, ok := r.take(time.Now()); ok {
			args := attributes(e)
			if suppressed > 0 {
				args = append(args, "suppressed", suppressed)
			}
			l.log.Warn(e.Kind(), args...)
		}
	}
}

// ofStore tells whether an event says that the store comes or goes.
func (l *eventLog) ofStore(e event.Event) bool {
	switch e := e.(type) {
	case event.TierSessionStarted:
		return l.store != "" && e.Peer == l.store
	case event.TierSessionEnded:
		return l.store != "" && e.Peer == l.store
	}
	return false
}

// logStore says once that the store has gone, and once that it has come; nobody waits for it meanwhile, so
// that nothing else would tell. It reports false for what was said before.
func (l *eventLog) logStore(e event.Event) bool {
	switch e := e.(type) {
	case event.TierSessionStarted:
		l.storeAway = false
		l.log.Info("the store is connected", "store", l.store)
	case event.TierSessionEnded:
		if l.storeAway {
			return false
		}
		l.storeAway = true
		l.log.Warn("no session with the store: it is asked again when requests come, and they are computed here meanwhile; if it refuses this engine, its own log says why",
			"store", l.store, "reason", e.Reason, "why", e.Why)
	}
	return true
}

func (l *eventLog) takeDropped() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.mu.dropped
	l.mu.dropped = 0
	return n
}

// rate lets warnBurst lines pass in warnEvery and counts the others.
type rate struct {
	since      time.Time
	passed     int
	suppressed int
}

func (r *rate) take(now time.Time) (suppressed int, ok bool) {
	if now.Sub(r.since) >= warnEvery {
		r.since, r.passed = now, 0
	}
	if r.passed >= warnBurst {
		r.suppressed++
		return 0, false
	}
	r.passed++
	suppressed, r.suppressed = r.suppressed, 0
	return suppressed, true
}

// isFault tells whether an operator should see an event without asking for it.
func isFault(e event.Event) bool {
	switch e := e.(type) {
	case event.HandshakeFinished:
		return e.Err != nil
	case event.TierPeerAdmitted:
		return e.Err != nil
	case event.LeaseEnded:
		return e.Reason == "expired"
	case event.LeaseRefused:
		return e.Phase != string(connector.PhaseCancel)
	case event.TransferFailed, event.NotificationFailed, event.NotificationDropped, event.RegistrationDropped, event.ClaimRefused,
		event.ReceiveFailed, event.BlocksQuarantined, peer.BadRequest,
		event.TierPeerRefused, event.TierLookupTimedOut, event.TierFetchFailed, event.TierBlocksDamaged:
		return true
	}
	return false
}

// attributes are an event's fields that say something, in their order.
func attributes(e event.Event) []any {
	v := reflect.ValueOf(e)
	var args []any
	for i := range v.NumField() {
		if f := v.Field(i); !f.IsZero() {
			args = append(args, v.Type().Field(i).Name, f.Interface())
		}
	}
	return args
}
