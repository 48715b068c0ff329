package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/proxy/core"
	"github.com/kvferry/kvferry/wire"
)

// releasableTurns answers as keeping does, and says how D is told to let go.
func releasableTurns(e *engine, w http.ResponseWriter, _ *http.Request, _ *seen) {
	_, _ = fmt.Fprintf(w, `{"id":"x","choices":[],"kv_transfer_params":{"do_remote_decode":true,"remote_block_ids":[[4]],"remote_engine_id":"d",`+
		`"remote_request_id":"r%d","remote_host":"127.0.0.1","remote_port":5601,"tp_size":1,"transfer_mode":"pull","kvferry_lease":12,"kvferry_release":"t-r%[1]d"}}`, len(e.legs()))
}

// keyed makes an engine that lets go only for whoever shows a key; each release comes out with what it showed.
func (e *engine) keyed() <-chan string {
	shown := make(chan string, 1024)
	e.letGo = func(w http.ResponseWriter, req *http.Request) {
		shown <- strings.Join([]string{<-e.told, req.Header.Get("Authorization"), req.Header.Get("X-Gateway"), req.Header.Get("Traceparent"), req.Header.Get("Cookie")}, "|")
		if req.Header.Get("Authorization") == "" {
			http.Error(w, `{"error":{"message":"no key"}}`, http.StatusUnauthorized)
			return
		}
		_, _ = io.WriteString(w, `{"released":true}`)
	}
	return shown
}

// chats sends one turn of each conversation, each with a key of its own.
func (r *rig) chats(t *testing.T, conversations ...string) {
	t.Helper()
	for _, c := range conversations {
		resp, got, err := r.post(t, "/v1/completions", fmt.Sprintf(`{"prompt":"x","conversation_id":%q}`, c),
			"Authorization", "Bearer "+c, "X-Gateway", "g-"+c, "Traceparent", "00-1", "Cookie", "secret")
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v %s", err, got)
		}
	}
	r.settled(t)
}

func shownOf(id, conversation string) string {
	return releaseOf(id) + "|Bearer " + conversation + "|g-" + conversation + "||"
}

// TestTurnIsDroppedWithItsKey: D is told with the key of the client whose turn it was, though another request, or
// none, is why it is dropped; the key is in no log.
func TestTurnIsDroppedWithItsKey(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, pullPrefill), newEngine(t, wire.DecodeLeg, releasableTurns)
	shown := d.keyed()
	p.mode, d.mode = "pull", "pull"
	r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}, ForwardHeaders: []string{"x-gateway"}, ConversationTTL: time.Millisecond})
	r.chats(t, "a")
	time.Sleep(2 * time.Millisecond) // the turn's time, which is real time
	r.chats(t, "b")                  // whoever comes next finds a's too old
	if got, want := await(t, "a release", shown), shownOf("r1", "a"); got != want {
		t.Errorf("D was shown %s, want %s", got, want)
	}
	// A turn of no conversation is let go at once.
	resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`, "Authorization", "Bearer c")
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %s", err, got)
	}
	r.settled(t)
	r.words.Wait()
	if got, want := await(t, "a release", shown), releaseOf("r3")+"|Bearer c|||"; got != want {
		t.Errorf("D was shown %s, want %s", got, want)
	}
	r.Close()
	if got, want := await(t, "a release", shown), shownOf("r2", "b"); got != want {
		t.Errorf("D was shown %s, want %s", got, want)
	}
	if _, metrics := r.fetch(t, "/metrics"); !strings.Contains(metrics, `kvferry_router_releases_total{result="released"} 3`) || strings.Contains(r.logs.String(), "Bearer") {
		t.Errorf("%s\n%s", metrics, r.logs)
	}
}

// TestCloseDropsTurns: decode engines are told of every turn that a router remembers when it ends, with the
// keys of their clients; one that hangs, or is gone, costs the others nothing.
func TestCloseDropsTurns(t *testing.T) {
	p := newEngine(t, wire.PrefillLeg, pullPrefill)
	good, stuck, gone := newEngine(t, wire.DecodeLeg, releasableTurns), newEngine(t, wire.DecodeLeg, releasableTurns), newEngine(t, wire.DecodeLeg, releasableTurns)
	p.mode, good.mode, stuck.mode, gone.mode = "pull", "pull", "pull", "pull"
	shown := good.keyed()
	stuck.letGo = func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() }
	r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: good.URL}, {URL: stuck.URL}, {URL: gone.URL}}, ForwardHeaders: []string{"X-Gateway"}})
	const each = 3*maxEndReleases + 1
	var want []string
	for i := range 3 * each { // in turn
		c := fmt.Sprintf("c%d", i)
		r.chats(t, c)
		if i%3 == 0 {
			want = append(want, shownOf(fmt.Sprintf("r%d", i/3+1), c))
		}
	}
	gone.Close()
	r.transport.CloseIdleConnections()
	r.Close()
	got := make([]string, 0, each)
	for range want {
		got = append(got, await(t, "a release", shown))
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) || len(shown) != 0 {
		t.Errorf("D was shown\n%v and %d more, want\n%v", got, len(shown), want)
	}
	if n := len(stuck.told); n > maxEndReleases {
		t.Errorf("an engine that does not answer was told of %d turns at a time", n)
	}
	_, metrics := r.fetch(t, "/metrics")
	for _, line := range []string{
		"kvferry_router_conversations 0\n", fmt.Sprintf("kvferry_router_turns_total{what=\"dropped\"} %d\n", 3*each),
		fmt.Sprintf("kvferry_router_releases_total{result=\"released\"} %d\n", each),
	} {
		if !strings.Contains(metrics, line) {
			t.Errorf("no %sin %s", line, metrics)
		}
	}
	log := r.logs.String()
	for _, level := range []string{
		`"level":"WARN","msg":"a decode engine was not told of all that it keeps for next turns; the rest stays until its --decoder-kv-blocks-ttl","engine":"` + stuck.addr(),
		`"level":"INFO","msg":"a decode engine was not told of all that it keeps for next turns; the rest stays until its --decoder-kv-blocks-ttl","engine":"` + gone.addr(),
	} {
		if strings.Count(log, level) != 1 {
			t.Errorf("the log does not say once %s:\n%s", level, log)
		}
	}
	if strings.Contains(log, "Bearer") {
		t.Error("a key is in the log")
	}
}

// TestCloseWaitsForLegs: a turn that ends while the router does is told of as well, and no request begins then.
func TestCloseWaitsForLegs(t *testing.T) {
	answer := make(chan struct{})
	p, d := newEngine(t, wire.PrefillLeg, pullPrefill), newEngine(t, wire.DecodeLeg, func(e *engine, w http.ResponseWriter, req *http.Request, s *seen) {
		<-answer
		releasableTurns(e, w, req, s)
	})
	r := pullPair(t, p, d)
	r.grace = patience
	client := make(chan error, 1)
	go func() {
		resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x","conversation_id":"a"}`)
		if err == nil && resp.StatusCode != 200 {
			err = fmt.Errorf("%d %s", resp.StatusCode, got)
		}
		client <- err
	}()
	await(t, "D's leg", d.arrived)
	r.gate.shut()
	if resp, got, err := r.post(t, "/v1/completions", `{"prompt":"x"}`); err != nil || resp.StatusCode != 503 || !strings.Contains(got, "shutting down") {
		t.Errorf("%v %+v %s", err, resp, got)
	}
	closed := make(chan struct{})
	go func() { defer close(closed); r.Close() }()
	close(answer)
	if err := await(t, "the client's answer", client); err != nil {
		t.Error(err)
	}
	if got := await(t, "a release", d.told); got != releaseOf("r1") {
		t.Errorf("D was told %s", got)
	}
	await(t, "the router's end", closed)
}

// TestCloseDoesNotWaitForALegWithoutEnd: a request that does not end costs the router's end its grace, and what is to be
// let go after that is told to nobody.
func TestCloseDoesNotWaitForALegWithoutEnd(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, pullPrefill), newEngine(t, wire.DecodeLeg, releasableTurns)
	r := pullPair(t, p, d)
	r.grace = time.Millisecond
	if !r.gate.enter() {
		t.Fatal("a new router is closed")
	}
	closed := make(chan struct{})
	go func() { defer close(closed); r.Close() }()
	await(t, "the router's end", closed)
	r.letGo(r.pools[core.Decode].named(d.addr()), []byte("{}"), http.Header{}, nil)
	r.words.Wait()
	if _, metrics := r.fetch(t, "/metrics"); !strings.Contains(metrics, `kvferry_router_releases_total{result="dropped"} 1`) || len(d.told) > 0 {
		t.Errorf("%d releases came\n%s", len(d.told), metrics)
	}
	r.gate.leave()
}

// TestNothingIsAskedBehindTheEnd: a request that outlives its router asks no engine for its coordinates, and is told at once.
func TestNothingIsAskedBehindTheEnd(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, goodPrefill), newEngine(t, wire.DecodeLeg, goodDecode)
	r := newRig(t, Config{Prefill: []Target{{URL: p.URL}}, Decode: []Target{{URL: d.URL}}})
	r.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, _, err := r.coordinates(ctx, r.pools[core.Prefill].named(p.addr())); !errors.Is(err, context.Canceled) || ctx.Err() != nil {
		t.Errorf("it is told %v", err)
	}
}

// TestCloseTellsNothingUnasked: an engine that has not said how it is told to let go, as a stock one, is not told.
func TestCloseTellsNothingUnasked(t *testing.T) {
	p, d := newEngine(t, wire.PrefillLeg, pullPrefill), newEngine(t, wire.DecodeLeg, keeping(false))
	r := pullPair(t, p, d)
	r.chats(t, "a", "b")
	r.Close()
	_, metrics := r.fetch(t, "/metrics")
	if len(d.told) > 0 || !strings.Contains(metrics, `kvferry_router_turns_total{what="dropped"} 2`) || strings.Contains(metrics, "kvferry_router_releases_total{") {
		t.Errorf("%d releases came\n%s", len(d.told), metrics)
	}
}
