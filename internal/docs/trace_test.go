package docs

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// trace is the events of two engines in the order in which they happened. Any goroutine emits.
type trace struct {
	start time.Time
	mu    struct {
		sync.Mutex
		lines []traceLine
	}
}

type traceLine struct {
	at        time.Duration
	who, kind string
	event     event.Event
}

func (l traceLine) String() string {
	fields := strings.TrimSuffix(strings.TrimPrefix(fmt.Sprintf("%+v", l.event), "{"), "}")
	return fmt.Sprintf("%6.2f ms  %s  %-21s %s", float64(l.at.Microseconds())/1000, l.who, l.kind, fields)
}

func (t *trace) of(who string) event.Sink {
	return event.SinkFunc(func(e event.Event) {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.mu.lines = append(t.mu.lines, traceLine{time.Since(t.start), who, e.Kind(), e})
	})
}

func (t *trace) snapshot() []traceLine {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.mu.lines)
}

// TestTraceOfTheWalkthrough hands one prompt from one engine to another, both in this process, and
// compares the events with the ones that docs/walkthrough.md explains. -v prints them.
func TestTraceOfTheWalkthrough(t *testing.T) {
	tr := &trace{start: time.Now()}
	p := startEngine(t, connector.Producer, kv.Push, tr.of("P"))
	d := startEngine(t, connector.Consumer, kv.Push, tr.of("D"))
	prompt := p.Tokenizer().Encode(strings.Repeat("A prompt of some blocks. ", 6))
	at := p.Coordinates()

	tr.start = time.Now() // no event yet: nobody knows anybody
	decode := submit(t, d, engine.Request{
		ID: "cmpl-walk-0-dddddddd", Prompt: prompt, MaxTokens: 4, IgnoreEOS: true,
		Params: &kv.TransferParams{
			DoRemotePrefill: true, RemoteEngineID: at.EngineID, RemoteHost: at.Host, RemotePort: at.Port,
			RemoteRequestID: "walk", TPSize: at.TPSize, PPSize: at.PPSize, TransferID: "xfer-1",
		},
	})
	prefill := submit(t, p, engine.Request{
		ID: "cmpl-walk-0-aaaaaaaa", Prompt: prompt, MaxTokens: 1, IgnoreEOS: true,
		Params: &kv.TransferParams{DoRemoteDecode: true, TransferID: "xfer-1"},
	})
	if out := last(t, prefill); out.Finish != connector.FinishLength || out.Params == nil {
		t.Fatalf("P ended as %q (%v) with parameters %v", out.Finish, out.Err, out.Params)
	}
	out := last(t, decode)
	if out.Finish != connector.FinishLength || out.Usage.ComputedPrompt != 1 || out.Transfer.Blocks == 0 {
		t.Fatalf("D ended as %q (%v), usage %+v, transfer %+v", out.Finish, out.Err, out.Usage, out.Transfer)
	}
	closeEngine(t, p) // waits until the blocks are no longer held
	closeEngine(t, d)
	tr.compare(t, "the events")
}

// TestTraceOfAPull is the same in pull, where P's answer comes first.
func TestTraceOfAPull(t *testing.T) {
	tr := &trace{start: time.Now()}
	p := startEngine(t, connector.Producer, kv.Pull, tr.of("P"))
	d := startEngine(t, connector.Consumer, kv.Pull, tr.of("D"))
	prompt := p.Tokenizer().Encode(strings.Repeat("A prompt of some blocks. ", 6))

	tr.start = time.Now()
	out := last(t, submit(t, p, engine.Request{
		ID: "cmpl-walk-0-aaaaaaaa", Prompt: prompt, MaxTokens: 1, IgnoreEOS: true, Params: &kv.TransferParams{DoRemoteDecode: true},
	}))
	if out.Finish != connector.FinishLength || out.Params == nil {
		t.Fatalf("P ended as %q (%v) with parameters %v", out.Finish, out.Err, out.Params)
	}
	out = last(t, submit(t, d, engine.Request{
		ID: "cmpl-walk-0-dddddddd", Prompt: prompt, MaxTokens: 4, IgnoreEOS: true, Params: out.Params,
	}))
	if out.Finish != connector.FinishLength || out.Usage.ComputedPrompt != 1 || out.Transfer.Blocks == 0 {
		t.Fatalf("D ended as %q (%v), usage %+v, transfer %+v", out.Finish, out.Err, out.Usage, out.Transfer)
	}
	closeEngine(t, p)
	closeEngine(t, d)
	tr.compare(t, "the same in pull")
}

// compare checks the kinds of events, up to the engines' end, against those below a heading of docs/walkthrough.md.
func (tr *trace) compare(t *testing.T, heading string) {
	t.Helper()
	got := map[string][]string{}
	for _, l := range tr.snapshot() {
		t.Log(l)
		if l.kind == "peer_gone" {
			break // the engines are being closed
		}
		got[l.who] = append(got[l.who], l.kind)
	}
	want := documentedTrace(t, heading)
	for _, kinds := range []map[string][]string{got, want} {
		meet(kinds["P"])
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the events are\n%v\ndocs/walkthrough.md has\n%v\nrun this test with -v and bring the document up to date", got, want)
	}
}

// meet puts P's events into one order where a run may have several: either side of a pair may come
// first, and P's handshake with D runs beside both.
func meet(kinds []string) {
	slices.SortStableFunc(kinds, func(a, b string) int { return cmp.Compare(rank(a), rank(b)) })
}

func rank(kind string) int {
	switch {
	case strings.HasPrefix(kind, "handshake_"):
		return 0
	case kind == "lease_taken":
		return 1
	case kind == "registration_received":
		return 2
	}
	return 3
}

var traceLineForm = regexp.MustCompile(`(?m)^ *[0-9.]+ ms  ([PD])  ([a-z_]+)`)

// documentedTrace is the kinds of events below a heading of the walkthrough, by engine.
func documentedTrace(t *testing.T, heading string) map[string][]string {
	t.Helper()
	raw, err := os.ReadFile("../../docs/walkthrough.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(raw), "\n## A real run: "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	out := map[string][]string{}
	for _, m := range traceLineForm.FindAllStringSubmatch(section, -1) {
		out[m[1]] = append(out[m[1]], m[2])
	}
	if len(out["P"]) == 0 || len(out["D"]) == 0 {
		t.Fatalf("docs/walkthrough.md has no trace of both engines under %q: %v", heading, out)
	}
	return out
}

func startEngine(t *testing.T, role connector.Role, mode kv.TransferMode, events event.Sink) *engine.Engine {
	t.Helper()
	e, err := engine.New(engine.Config{EngineID: kv.EngineID(role), Role: role, Mode: mode, NumBlocks: 64, Events: events})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeEngine(t, e) })
	return e
}

func closeEngine(t *testing.T, e *engine.Engine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := e.Close(ctx); err != nil {
		t.Error(err)
	}
}

func submit(t *testing.T, e *engine.Engine, r engine.Request) *engine.Stream {
	t.Helper()
	s, err := e.Submit(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// last reads a stream to its end.
func last(t *testing.T, s *engine.Stream) engine.Output {
	t.Helper()
	for {
		out, err := s.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if out.Finish != "" {
			return out
		}
	}
}
