package main

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/event"
)

func TestEventLogLevels(t *testing.T) {
	for _, level := range []slog.Level{slog.LevelInfo, slog.LevelDebug} {
		var out bytes.Buffer
		l := newEventLog(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level})), "")
		l.Emit(event.GrantIssued{Request: "r1", Peer: "p", Blocks: 3})
		l.Emit(event.ReceiveFailed{Request: "r2", Peer: "p", Phase: "wait", Err: errors.New("silent")})
		l.Emit(event.HandshakeFinished{Engine: "p", Gen: 1, Transport: "shm"})
		l.Emit(event.HandshakeFinished{Engine: "q", Err: errors.New("refused")})
		l.Emit(event.LeaseEnded{Request: "r3", Reason: "sent"})
		l.Emit(event.LeaseEnded{Request: "r4", Reason: "expired"})
		l.Emit(event.LeaseRefused{Request: "r6", Phase: "cancel", Reason: "cancelled before"})
		l.Emit(event.LeaseRefused{Request: "r7", Phase: "limit", Reason: "too many"})
		l.Emit(event.ClaimRefused{Request: "r8", Phase: "lease"})
		l.Close()
		l.Emit(event.LeaseEnded{Request: "r5", Reason: "expired"}) // after Close: nothing happens
		got := out.String()
		for _, want := range []string{"level=WARN msg=receive_failed Request=r2 Peer=p Phase=wait Err=silent", "Engine=q", "Request=r4", "level=WARN msg=lease_refused Request=r7", "level=WARN msg=claim_refused Request=r8"} {
			if !strings.Contains(got, want) {
				t.Errorf("%v: the log lacks %q:\n%s", level, want, got)
			}
		}
		if debug := strings.Contains(got, "grant_issued") && strings.Contains(got, "Request=r3") && strings.Contains(got, "Request=r6"); debug != (level == slog.LevelDebug) {
			t.Errorf("%v: everything shown is %v:\n%s", level, debug, got)
		}
		if strings.Contains(got, "r5") {
			t.Errorf("logged after Close:\n%s", got)
		}
	}
}

func TestEventLogDoesNotFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := newEventLog(slog.New(slog.NewTextHandler(&out, nil)), "")
		for range 500 {
			l.Emit(event.NotificationDropped{From: "stranger", What: "notification"})
		}
		synctest.Wait()
		time.Sleep(warnEvery)
		l.Emit(event.NotificationDropped{From: "stranger", What: "notification"})
		l.Close()
		if n := strings.Count(out.String(), "\n"); n != warnBurst+1 {
			t.Errorf("%d lines, want %d:\n%s", n, warnBurst+1, out.String())
		}
		if !strings.Contains(out.String(), "suppressed=495") {
			t.Errorf("the last line does not count what was left out:\n%s", out.String())
		}
	})
}

// A log that nobody reads must not stop who emits.
func TestEventLogNeverBlocks(t *testing.T) {
	w := &stuckWriter{stuck: make(chan struct{}), free: make(chan struct{})}
	l := newEventLog(slog.New(slog.NewTextHandler(w, nil)), "")
	l.Emit(event.TransferFailed{Request: "r"})
	<-w.stuck
	for range 2 * eventQueue {
		l.Emit(event.TransferFailed{Request: "r"})
	}
	close(w.free)
	l.Close()
	if l.mu.dropped == 0 && !strings.Contains(w.out.String(), "events were not logged") {
		t.Errorf("%d events went through a queue of %d, and none is said to be dropped", 2*eventQueue, eventQueue)
	}
}

type stuckWriter struct {
	stuck, free chan struct{}
	began       bool
	out         bytes.Buffer
}

func (w *stuckWriter) Write(b []byte) (int, error) {
	if !w.began {
		w.began = true
		close(w.stuck)
		<-w.free
	}
	return w.out.Write(b)
}

// A store that goes and one that comes are said once each, at every level.
func TestEventLogTellsOfTheStore(t *testing.T) {
	var out bytes.Buffer
	l := newEventLog(slog.New(slog.NewTextHandler(&out, nil)), "s:1")
	gone := event.TierSessionEnded{Peer: "s:1", Reason: "lost", Why: "no connection to it"}
	for range 3 {
		l.Emit(gone)
	}
	l.Emit(event.TierSessionEnded{Peer: "other:1", Reason: "lost"})
	l.Emit(event.TierSessionStarted{Peer: "other:1"})
	l.Emit(event.TierSessionStarted{Peer: "s:1"})
	l.Emit(gone)
	l.Close()
	var levels []string
	for line := range strings.Lines(out.String()) {
		_, rest, _ := strings.Cut(line, "level=")
		level, _, _ := strings.Cut(rest, " ")
		levels = append(levels, level)
		if !strings.Contains(line, "store=s:1") {
			t.Errorf("not of the store: %s", line)
		}
	}
	if got := strings.Join(levels, " "); got != "WARN INFO WARN" || strings.Count(out.String(), "no connection to it") != 2 {
		t.Errorf("%s\n%s", got, out.String())
	}
}
