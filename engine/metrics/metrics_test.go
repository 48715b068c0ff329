package metrics

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// values are all series of a collector: counters and gauges by value, histograms by count and sum.
func values(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				if l.GetName() != "model_name" && l.GetName() != "engine" {
					labels = append(labels, l.GetName()+"="+l.GetValue())
				}
			}
			name := f.GetName()
			if len(labels) > 0 {
				name += "{" + strings.Join(labels, ",") + "}"
			}
			switch {
			case m.GetHistogram() != nil:
				out[name+" count"] = float64(m.GetHistogram().GetSampleCount())
				out[name+" sum"] = m.GetHistogram().GetSampleSum()
			case m.GetCounter() != nil:
				out[name] = m.GetCounter().GetValue()
			default:
				out[name] = m.GetGauge().GetValue()
			}
		}
	}
	return out
}

// delta is what an event changes, without the count of events by kind.
func delta(before, after map[string]float64) map[string]float64 {
	out := map[string]float64{}
	for name, v := range after {
		if d := v - before[name]; d != 0 && !strings.HasPrefix(name, "kvferry_connector_events_total") {
			out[name] = d
		}
	}
	return out
}

var errFault = errors.New("a fault")

// TestDeltas says what each event moves.
func TestDeltas(t *testing.T) {
	type d = map[string]float64
	const own, nixl = "kvferry_connector_", "vllm:nixl_"
	transfer := event.TransferDone{Op: event.Write, Descs: 40, Bytes: 4096, Post: 2 * time.Millisecond, Took: 250 * time.Millisecond}
	read := transfer
	read.Op = event.Read
	observed := func(direction string) d {
		return d{
			own + "transfers_total{result=done}": 1, own + "bytes_total{direction=" + direction + "}": 4096,
			nixl + "xfer_time_seconds count": 1, nixl + "xfer_time_seconds sum": .25, nixl + "post_time_seconds count": 1, nixl + "post_time_seconds sum": .002,
			nixl + "bytes_transferred count": 1, nixl + "bytes_transferred sum": 4096, nixl + "num_descriptors count": 1, nixl + "num_descriptors sum": 40,
		}
	}
	failure := func(kind string) string { return own + "failures_total{kind=" + kind + "}" }
	received := event.ReceiveFinished{Blocks: 2, Bytes: 4096, Waited: 500 * time.Millisecond}
	taken := event.LeaseTaken{Request: "r"}
	for _, c := range []struct {
		name   string
		mode   kv.TransferMode
		before []event.Event
		ev     event.Event
		want   d
	}{
		{name: "handshake begins", ev: event.HandshakeStarted{}, want: d{}},
		{name: "handshake", ev: event.HandshakeFinished{Took: time.Second}, want: d{
			own + "handshakes_total{result=ok}": 1, own + "handshake_seconds count": 1, own + "handshake_seconds sum": 1, own + "peers": 1}},
		{name: "handshake fails", ev: event.HandshakeFinished{Err: errFault}, want: d{
			own + "handshakes_total{result=failed}": 1, failure("handshake"): 1, nixl + "num_failed_transfers_total": 1}},
		{name: "peer gone", before: []event.Event{event.HandshakeFinished{}}, ev: event.PeerGone{}, want: d{own + "peers": -1}},
		{name: "sent", ev: event.RegistrationSent{}, want: d{own + "registrations_total{what=sent}": 1}},
		{name: "received", ev: event.RegistrationReceived{}, want: d{own + "registrations_total{what=received}": 1}},
		{name: "matched", ev: event.RegistrationMatched{By: "base_id"}, want: d{
			own + "registrations_total{what=matched}": 1, own + "registration_matches_total{by=base_id}": 1}},
		{name: "dropped", ev: event.RegistrationDropped{Reason: "any"}, want: d{own + "registrations_total{what=dropped}": 1}},
		{name: "posted", ev: event.TransferPosted{}, want: d{own + "transfers_total{result=posted}": 1}},
		{name: "push done", ev: transfer, want: observed("sent")},
		{name: "pull done", mode: kv.Pull, ev: read, want: observed("received")},
		{name: "claim sent", ev: event.ClaimSent{}, want: d{own + "claims_total{what=sent}": 1}},
		{name: "claim received", ev: event.ClaimReceived{}, want: d{own + "claims_total{what=received}": 1}},
		{name: "claim refused", ev: event.ClaimRefused{Phase: "lease"}, want: d{own + "claims_total{what=refused}": 1}},
		{name: "claim read", ev: event.ClaimEnded{How: "read"}, want: d{own + "claims_total{what=read}": 1}},
		{name: "claim ends in a way of tomorrow", ev: event.ClaimEnded{How: "x"}, want: d{own + "claims_total{what=other}": 1}},
		{name: "cancel sent", ev: event.CancelSent{}, want: d{own + "cancels_total{what=sent}": 1}},
		{name: "cancel received", ev: event.CancelReceived{}, want: d{own + "cancels_total{what=received}": 1}},
		{name: "post fails", ev: event.TransferFailed{Phase: "post", Err: errFault}, want: d{
			own + "transfers_total{result=failed}": 1, failure("transfer"): 1, nixl + "num_failed_transfers_total": 1}},
		{name: "transfer fails", ev: event.TransferFailed{Phase: "transfer", Err: errFault}, want: d{
			own + "transfers_total{result=failed}": 1, failure("transfer"): 1, nixl + "num_failed_transfers_total": 1}},
		{name: "no transfer after a failed handshake", ev: event.TransferFailed{Phase: "handshake", Err: errFault}, want: d{own + "transfers_total{result=failed}": 1}},
		{name: "nobody wants it", ev: event.TransferFailed{Phase: "transfer", GivenUp: true, Err: errFault}, want: d{own + "transfers_total{result=failed}": 1}},
		{name: "stopped", ev: event.TransferStopped{}, want: d{}},
		{name: "notification fails", ev: event.NotificationFailed{What: "registration", Err: errFault}, want: d{
			own + "unsent_notifications_total{what=registration}": 1, failure("notification"): 1,
			nixl + "num_failed_notifications_total": 1, nixl + "num_failed_transfers_total": 1}},
		{name: "beat fails", ev: event.NotificationFailed{What: "beat", Err: errFault}, want: d{own + "unsent_notifications_total{what=beat}": 1}},
		{name: "heartbeat fails", ev: event.NotificationFailed{What: "heartbeat", Err: errFault}, want: d{own + "unsent_notifications_total{what=heartbeat}": 1}},
		{name: "late completion", ev: event.NotificationDropped{What: "completion"}, want: d{
			failure("notification_dropped"): 1, nixl + "num_notifications_after_expiry_total": 1}},
		{name: "garbage", ev: event.NotificationDropped{What: "notification"}, want: d{failure("notification_dropped"): 1}},
		{name: "received in push", ev: received, want: d{own + "receives_total{phase=done}": 1, own + "receive_wait_seconds count": 1,
			own + "receive_wait_seconds sum": .5, own + "bytes_total{direction=received}": 4096}},
		{name: "received in pull", mode: kv.Pull, ev: received, want: d{own + "receives_total{phase=done}": 1, own + "receive_wait_seconds count": 1,
			own + "receive_wait_seconds sum": .5}},
		{name: "P is silent", ev: event.ReceiveFailed{Phase: "wait", Err: errFault}, want: d{own + "receives_total{phase=wait}": 1, failure("receive"): 1}},
		{name: "P's write failed", ev: event.ReceiveFailed{Phase: "transfer", Err: errFault}, want: d{own + "receives_total{phase=transfer}": 1, failure("receive"): 1}},
		{name: "our read failed", mode: kv.Pull, ev: event.ReceiveFailed{Phase: "transfer", Told: true, Err: errFault}, want: d{own + "receives_total{phase=transfer}": 1}},
		{name: "our handshake failed", ev: event.ReceiveFailed{Phase: "handshake", Told: true, Err: errFault}, want: d{own + "receives_total{phase=handshake}": 1}},
		{name: "P has another geometry", ev: event.ReceiveFailed{Phase: "handshake", Err: errFault}, want: d{own + "receives_total{phase=handshake}": 1, failure("receive"): 1}},
		{name: "timed out", ev: event.ReceiveTimedOut{After: time.Second}, want: d{failure("receive"): 1}},
		{name: "cancelled", ev: event.ReceiveFailed{Phase: "cancel", Err: errFault}, want: d{own + "receives_total{phase=cancel}": 1}},
		{name: "a phase of tomorrow", ev: event.ReceiveFailed{Phase: "x", Err: errFault}, want: d{own + "receives_total{phase=other}": 1, failure("receive"): 1}},
		{name: "lease", ev: taken, want: d{own + "leases": 1}},
		{name: "lease extended", before: []event.Event{taken}, ev: event.LeaseExtended{Request: "r"}, want: d{own + "lease_extensions_total": 1}},
		{name: "sent and given back", before: []event.Event{taken}, ev: event.LeaseEnded{Request: "r", Reason: "sent"}, want: d{
			own + "leases": -1, own + "leases_ended_total{reason=sent}": 1}},
		{name: "one of two ranks", before: []event.Event{taken, taken}, ev: event.LeaseEnded{Request: "r", Reason: "sent"}, want: d{
			own + "leases": -1, own + "leases_ended_total{reason=sent}": 1}},
		{name: "expired", before: []event.Event{taken}, ev: event.LeaseEnded{Request: "r", Reason: "expired"}, want: d{
			own + "leases": -1, own + "leases_ended_total{reason=expired}": 1, failure("lease_expired"): 1, nixl + "num_kv_expired_reqs_total": 1}},
		{name: "failed", before: []event.Event{taken}, ev: event.LeaseEnded{Request: "r", Reason: "failed"}, want: d{
			own + "leases": -1, own + "leases_ended_total{reason=failed}": 1}},
		{name: "refused", ev: event.LeaseRefused{Request: "r", Reason: "full"}, want: d{own + "leases_refused_total": 1}},
		{name: "granted", ev: event.GrantIssued{}, want: d{own + "grants_total{what=issued}": 1, own + "grants": 1}},
		{name: "revoked", before: []event.Event{event.GrantIssued{}}, ev: event.GrantRevoked{}, want: d{own + "grants_total{what=revoked}": 1, own + "grants": -1}},
		{name: "quarantined", ev: event.BlocksQuarantined{Blocks: 3}, want: d{own + "quarantines_total": 1, own + "quarantined_blocks": 3}},
		{name: "quarantine ends", before: []event.Event{event.BlocksQuarantined{Blocks: 3}}, ev: event.QuarantineEnded{Blocks: 3}, want: d{own + "quarantined_blocks": -3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := New(Config{Model: "m", Mode: c.mode})
			for _, e := range c.before {
				m.Emit(e)
			}
			before := values(t, m)
			m.Emit(c.ev)
			got := delta(before, values(t, m))
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
			var failures float64
			for name, v := range got {
				if strings.HasPrefix(name, own+"failures_total") {
					failures += v
				}
			}
			if failures > 1 {
				t.Errorf("one event moves failures by %v", failures)
			}
		})
	}
}

// TestOneFaultOneFailure gives an engine all that it reports about one fault.
func TestOneFaultOneFailure(t *testing.T) {
	for name, c := range map[string]struct {
		mode   kv.TransferMode
		events []event.Event
	}{
		"P cannot reach D": {kv.Push, []event.Event{
			event.LeaseTaken{Request: "r"}, event.RegistrationReceived{}, event.RegistrationMatched{By: "id"}, event.HandshakeStarted{},
			event.HandshakeFinished{Err: errFault}, event.TransferFailed{Phase: "handshake", Err: errFault}, event.RegistrationDropped{}, event.LeaseEnded{Request: "r", Reason: "failed"}}},
		"D cannot reach P": {kv.Push, []event.Event{event.HandshakeFinished{Err: errFault}, event.ReceiveFailed{Phase: "handshake", Told: true, Err: errFault}}},
		"a WRITE fails on P": {kv.Push, []event.Event{
			event.TransferPosted{}, event.TransferFailed{Phase: "transfer", Err: errFault}, event.TransferStopped{}, event.LeaseEnded{Reason: "failed"}}},
		"the same on D": {kv.Push, []event.Event{event.GrantIssued{}, event.RegistrationSent{}, event.GrantRevoked{}, event.ReceiveFailed{Phase: "transfer", Err: errFault}}},
		"a READ fails on D": {kv.Pull, []event.Event{
			event.TransferPosted{}, event.TransferFailed{Phase: "transfer", Err: errFault}, event.TransferStopped{}, event.ReceiveFailed{Phase: "transfer", Told: true, Err: errFault}}},
		"D never comes":  {kv.Pull, []event.Event{event.LeaseTaken{Request: "r"}, event.LeaseEnded{Request: "r", Reason: "expired"}}},
		"P is gone":      {kv.Push, []event.Event{event.RegistrationSent{}, event.PeerGone{}, event.GrantRevoked{}, event.ReceiveFailed{Phase: "wait", Err: errFault}}},
		"a late message": {kv.Push, []event.Event{event.NotificationDropped{What: "completion"}}},
	} {
		m := New(Config{Mode: c.mode})
		for _, e := range c.events {
			m.Emit(e)
		}
		sum := 0.0
		for name, v := range values(t, m) {
			if strings.HasPrefix(name, "kvferry_connector_failures_total") {
				sum += v
			}
		}
		if sum != 1 {
			t.Errorf("%s: failures moved by %v, want 1", name, sum)
		}
	}
}

// TestStockNames holds names, types, labels and buckets against those of nixl-connector.md, section 10.
func TestStockNames(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	m := New(Config{Model: "the-model", Engine: "3"})
	r.MustRegister(m)
	for _, e := range []event.Event{event.TransferDone{}} {
		m.Emit(e)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "vllm:") {
			if !strings.HasPrefix(f.GetName(), "kvferry_connector_") {
				t.Errorf("%s has another prefix", f.GetName())
			}
			continue
		}
		s := f.GetType().String()
		for _, l := range f.GetMetric()[0].GetLabel() {
			s += " " + l.GetName() + "=" + l.GetValue()
		}
		for _, b := range f.GetMetric()[0].GetHistogram().GetBucket() {
			s += fmt.Sprintf(" %v", b.GetUpperBound())
		}
		got[f.GetName()] = s
	}
	const labels = " engine=3 model_name=the-model"
	want := map[string]string{
		"vllm:nixl_xfer_time_seconds":                    "HISTOGRAM" + labels + " 0.005 0.01 0.025 0.05 0.075 0.1 0.2 0.3 0.5 0.75 1 5",
		"vllm:nixl_post_time_seconds":                    "HISTOGRAM" + labels + " 0.001 0.005 0.01 0.025 0.05 0.075 0.1 0.2 0.3 0.5 0.75 1 5",
		"vllm:nixl_bytes_transferred":                    "HISTOGRAM" + labels + " 2048 8192 32768 131072 524288 2.097152e+06 8.388608e+06 3.3554432e+07 1.34217728e+08 5.36870912e+08 2.147483648e+09 8.589934592e+09",
		"vllm:nixl_num_descriptors":                      "HISTOGRAM" + labels + " 10 20 30 50 75 100 200 400 1000 2000 4000 10000 20000 50000",
		"vllm:nixl_num_failed_transfers_total":           "COUNTER" + labels,
		"vllm:nixl_num_failed_notifications_total":       "COUNTER" + labels,
		"vllm:nixl_num_kv_expired_reqs_total":            "COUNTER" + labels,
		"vllm:nixl_num_notifications_after_expiry_total": "COUNTER" + labels,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// TestManyGoroutines emits while somebody collects.
func TestManyGoroutines(t *testing.T) {
	m := New(Config{})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 200 {
				m.Emit(event.LeaseTaken{Request: kv.RequestID(fmt.Sprint(i))})
				m.Emit(event.TransferDone{Bytes: 1})
				m.Emit(event.LeaseEnded{Request: kv.RequestID(fmt.Sprint(i)), Reason: "sent"})
			}
		})
	}
	_ = values(t, m)
	wg.Wait()
	got := values(t, m)
	if got["kvferry_connector_leases"] != 0 || got["kvferry_connector_bytes_total{direction=sent}"] != 1600 {
		t.Errorf("%v", got)
	}
}
