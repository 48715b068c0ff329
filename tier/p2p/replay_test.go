package p2p

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"encoding/hex"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// recorded is one exchange of two released tiers, apart by direction.
type recorded struct{ source, consumer [][]byte }

func recordings(t *testing.T) map[string]recorded {
	t.Helper()
	var f struct {
		Cases []struct {
			Name     string
			Messages []struct {
				From string
				Hex  hexBytes
			}
		}
	}
	load(t, "golden.json", &f)
	out := map[string]recorded{}
	for _, c := range f.Cases {
		var r recorded
		for _, m := range c.Messages {
			if m.From == "source" {
				r.source = append(r.source, m.Hex)
			} else {
				r.consumer = append(r.consumer, m.Hex)
			}
		}
		out[c.Name] = r
	}
	return out
}

// stockKey is the key that the recordings call by its byte.
func stockKey(b byte) core.Key {
	return core.Key(append(bytes.Repeat([]byte{b}, 32), 0, 0, 0, 0))
}

func stockKeys(bs ...byte) (ks []core.Key) {
	for _, b := range bs {
		ks = append(ks, stockKey(b))
	}
	return ks
}

// This node is the source, the recorded consumer asks. Every answer is the recorded one, byte for byte.
func TestReplayAsSource(t *testing.T) {
	rec := recordings(t)
	n, ag := stockNode(t)
	n.have(stockKeys(1, 2, 4))
	s := newStock(t, n)
	s.meet()
	prefill := func(req, id string) {
		n.begin(tier.Request{ID: kv.RequestID(req), Decoder: &tier.Decoder{KVRequestID: id}})
	}

	r := rec["symmetric-hit-and-miss"]
	s.send(r.consumer[0])
	s.expect(r.source[0])
	s.send(r.consumer[1])
	s.send(r.consumer[2])
	s.expect(r.source[1])
	ag.finish(t)
	s.expect(r.source[2])
	s.send(rec["finish-after-fetch"].consumer[0])

	r = rec["probe-only-finish"]
	s.send(r.consumer[0])
	s.expect(r.source[0])
	s.send(r.consumer[1])

	r = rec["symmetric-unicode-id"]
	s.send(r.consumer[0])
	s.expect(r.source[0])
	s.send(r.consumer[1])
	ag.finish(t)
	s.expect(r.source[1])

	r = rec["pd-prefill-first"]
	prefill("p1", "pd-1")
	n.compute("p1", stockKeys(0x14, 0x15))
	s.send(r.consumer[0])
	ag.finish(t)
	s.expect(r.source[0])
	n.m.Finish("p1")

	r = rec["pd-decode-first-two-supplies"]
	s.send(r.consumer[0])
	prefill("p2", "pd-2")
	n.compute("p2", stockKeys(0x1e))
	ag.finish(t)
	n.compute("p2", stockKeys(0x1f))
	ag.finish(t)
	s.expect(r.source[0])
	n.m.Finish("p2")

	r = rec["pd-partial-then-finish"]
	s.send(r.consumer[0])
	prefill("p3", "pd-3")
	n.compute("p3", stockKeys(0x28))
	ag.finish(t)
	n.m.Finish("p3")
	s.expect(r.source[0])

	r = rec["abort-by-finish"]
	s.send(r.consumer[0])
	s.send(r.consumer[1])
	s.expect(r.source[0])

	s.send(rec["shutdown"].consumer[0])
	n.noted("session_ended", "it has disconnected")
	n.quiet()
}

// This node is the consumer, the recorded source answers.
func TestReplayAsConsumer(t *testing.T) {
	rec := recordings(t)
	n, _ := stockNode(t)
	s := newStock(t, n)
	source := func(id string, everything bool) *tier.Source {
		src := (&node{name: s.name}).source(id)
		src.Everything = everything
		return src
	}
	verdicts := func(req kv.RequestID, want string, ks []core.Key) {
		t.Helper()
		got := ""
		for _, v := range n.lookup(req, ks) {
			got += map[core.Verdict]string{core.Hit: "+", core.Miss: "-"}[v]
		}
		if got != want {
			t.Fatalf("%s: %s, want %s", req, got, want)
		}
	}
	ask := func(req kv.RequestID, ks []core.Key) { n.m.Lookup(req, ks) }

	// handshake: the consumer opens.
	n.begin(tier.Request{ID: "r1", Source: source("sym-1", false)})
	s.expectType("connect")
	s.send(s.connect())
	s.send(wire.AppendP2P(nil, wire.P2PConnectAck{PeerID: s.name}))
	s.expectType("connect_ack")

	// The recorded consumer asks for the missed key again after its fetch, and owes an empty fetch for
	// that; this one keeps the miss, so its part ends with the fetch.
	r := rec["symmetric-hit-and-miss"]
	ks := stockKeys(1, 2, 9)
	ask("r1", ks)
	s.expect(r.consumer[0])
	s.send(r.source[0])
	<-n.changed
	ask("r1", ks)
	s.expect(r.consumer[1])
	s.send(r.source[2])
	verdicts("r1", "++-", ks)
	n.m.Finish("r1")

	r = rec["probe-only-finish"]
	n.begin(tier.Request{ID: "r2", Source: source("sym-2", false)})
	ask("r2", stockKeys(8))
	s.expect(r.consumer[0])
	s.send(r.source[0])
	verdicts("r2", "-", stockKeys(8))
	n.m.Finish("r2")
	s.expect(r.consumer[1])

	r = rec["symmetric-unicode-id"]
	n.begin(tier.Request{ID: "r3", Source: source("请求-3", false)})
	ask("r3", stockKeys(4))
	s.expect(r.consumer[0])
	s.send(r.source[0])
	for n.m.Stats().Loads == 0 {
		ask("r3", stockKeys(4))
		time.Sleep(time.Millisecond) // until the answer is in
	}
	s.expect(r.consumer[1])
	s.send(r.source[1])
	verdicts("r3", "+", stockKeys(4))
	n.m.Finish("r3")

	for i, c := range []struct {
		name, id string
		keys     []core.Key
		want     string
	}{
		{"pd-prefill-first", "pd-1", stockKeys(0x14, 0x15), "++"},
		{"pd-decode-first-two-supplies", "pd-2", stockKeys(0x1e, 0x1f), "++"},
		{"pd-partial-then-finish", "pd-3", stockKeys(0x28, 0x29), "--"},
	} {
		r = rec[c.name]
		req := kv.RequestID(fmt.Sprint("pd", i))
		n.begin(tier.Request{ID: req, Source: source(c.id, true)})
		ask(req, c.keys)
		s.expect(r.consumer[0])
		s.send(r.source[0])
		verdicts(req, c.want, c.keys)
		n.m.Finish(req)
	}

	r = rec["abort-by-finish"]
	n.begin(tier.Request{ID: "r9", Source: source("pd-4", true)})
	ask("r9", stockKeys(0x32))
	s.expect(r.consumer[0])
	n.m.Finish("r9")
	s.expect(r.consumer[1])
	s.send(r.source[0])

	n.close()
	s.expect(rec["shutdown"].consumer[0])
}

// A hit whose answer comes after the fetch of another was asked for is of no use: the source keeps hits for one
// fetch. The key is asked for anew, and not fetched under a round that has no lookup, for which a
// source would wait in vain.
func TestLateHitIsAskedAnew(t *testing.T) {
	n, _ := stockNode(t)
	s := newStock(t, n)
	n.begin(tier.Request{ID: "r", Source: (&node{name: s.name}).source("q")})
	s.expectType("connect")
	s.send(s.connect())
	s.expectType("connect_ack")
	s.send(wire.AppendP2P(nil, wire.P2PConnectAck{PeerID: s.name}))
	n.m.Lookup("r", stockKeys(1))
	s.expectKeys("lookup", 1)
	n.m.Lookup("r", stockKeys(1, 2))
	s.expectKeys("lookup", 2)
	s.send(wire.AppendP2P(nil, &wire.P2PLookupResp{ID: "q", Keys: stockKeys(1), Hits: []bool{true}}))
	n.startLoad("r", stockKeys(1, 2)) // of the first alone
	s.send(wire.AppendP2P(nil, &wire.P2PLookupResp{ID: "q", Keys: stockKeys(2), Hits: []bool{true}}))
	s.expectKeys("fetch", 1)
	done := make(chan string)
	go func() {
		got := ""
		for _, v := range n.lookup("r", stockKeys(1, 2)) {
			got += fmt.Sprint(v, " ")
		}
		done <- got
	}()
	s.expectKeys("lookup", 2)
	s.send(wire.AppendP2P(nil, wire.P2PTransferDone{ID: "q", Success: true}))
	s.send(wire.AppendP2P(nil, &wire.P2PLookupResp{ID: "q", Keys: stockKeys(2), Hits: []bool{true}}))
	s.expectKeys("fetch", 2)
	s.send(wire.AppendP2P(nil, wire.P2PTransferDone{ID: "q", Success: true, Round: 1}))
	if got := <-done; got != "hit hit " {
		t.Error(got)
	}
	n.m.Finish("r")
}

// expectKeys checks that a lookup or a fetch is for just one key.
func (s *stock) expectKeys(typ string, k byte) {
	s.t.Helper()
	m, err := wire.DecodeP2P(s.next())
	if err != nil || m.Type() != typ {
		s.t.Fatalf("%+v (%v), want a %s", m, err, typ)
	}
	var got []core.Key
	switch m := m.(type) {
	case *wire.P2PLookup:
		got = m.Keys
	case *wire.P2PFetch:
		got = m.Keys
	}
	if !slices.Equal(got, stockKeys(k)) {
		s.t.Fatalf("a %s for %q, want key %d", typ, got, k)
	}
}

// What the released tier was sent that is odd: the session lives or ends as there, and the answers
// are the same, but where this node is safer.
func TestReplayInvalid(t *testing.T) {
	var f struct {
		Cases []struct {
			Name    string
			After   bool `json:"after_handshake"`
			Sent    []any
			Replies []struct{ Type string }
			Session string
		}
	}
	load(t, "invalid.json", &f)
	safer := map[string]string{
		"lookup-key-int":           "an int is no key (H24)",
		"lookup-key-int-list":      "a list is no key (H24)",
		"fetch-index-out-of-range": "refused with transfer_done(false) instead of silence (H7)",
		"fetch-index-2^31":         "likewise",
		"fetch-before-connect":     "nothing before the connect",
		"lookup-before-connect":    "nothing before the connect",
		"ack-before-connect":       "the link is dropped",
		"connect-metadata-garbage": "a failed admission ends the session (H8)",
		"connect-metadata-empty":   "likewise",
	}
	ran := 0
	for _, c := range f.Cases {
		frames, ok := framesOf(c.Sent)
		if !ok {
			continue // the recording has only its beginning
		}
		ran++
		t.Run(c.Name, func(t *testing.T) {
			n, _ := stockNode(t)
			n.have(stockKeys(1))
			s := newStock(t, n)
			if c.After {
				s.meet()
			}
			for _, fr := range frames {
				if err := s.dealer.Send(t.Context(), fr...); err != nil {
					break // dropped already
				}
			}
			_ = s.dealer.Send(t.Context(), wire.AppendP2P(nil, wire.P2PAbortFetch{ID: "probe", Round: 1}))
			replies, alive := s.until("probe")
			var want []string
			for _, r := range c.Replies {
				want = append(want, r.Type)
			}
			same := strings.Join(replies, " ") == strings.Join(want, " ") && alive == (c.Session == "alive")
			if _, listed := safer[c.Name]; listed == same {
				t.Errorf("replies %v, alive %v; the released tier: %v, %s; listed as safer: %v", replies, alive, want, c.Session, listed)
			}
		})
	}
	if ran < 30 {
		t.Errorf("only %d cases ran", ran)
	}
}

func framesOf(sent []any) (out [][][]byte, ok bool) {
	one := func(x any) []byte {
		b, err := hex.DecodeString(x.(string))
		if err != nil {
			ok = false
		}
		return b
	}
	ok = true
	for _, x := range sent {
		if parts, many := x.([]any); many {
			var fr [][]byte
			for _, p := range parts {
				fr = append(fr, one(p))
			}
			out = append(out, fr)
			continue
		}
		out = append(out, [][]byte{one(x)})
	}
	return out, ok
}

// until collects the replies until the probe is acked, or the node has hung up.
func (s *stock) until(probe string) (types []string, alive bool) {
	s.t.Helper()
	for {
		select {
		case b := <-s.got:
			m, err := wire.DecodeP2P(b)
			if err != nil {
				s.t.Fatal(err)
			}
			if a, ok := m.(wire.P2PAbortAck); ok && a.ID == probe {
				return types, true
			}
			types = append(types, m.Type())
			if m.Type() == "disconnect" {
				return types, false
			}
		case <-s.dealer.Done():
			if err := s.dealer.Err(); err != nil && !errors.Is(err, io.EOF) {
				s.t.Log(err)
			}
			select {
			case b := <-s.got:
				m, _ := wire.DecodeP2P(b)
				types = append(types, m.Type())
				continue
			case <-time.After(50 * time.Millisecond): // a last word may be under way on the other connection
			}
			return types, false
		case <-time.After(patience):
			s.t.Fatal("neither alive nor gone")
		}
	}
}
