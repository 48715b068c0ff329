package connector

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/kv"
)

func drawID(t *rapid.T) string { return rapid.StringN(0, 12, -1).Draw(t, "text") }

func drawBlocks(t *rapid.T) kv.BlockIDs {
	return kv.BlockIDs(rapid.SliceOfN(rapid.SliceOfN(rapid.Custom(func(t *rapid.T) kv.BlockID {
		return kv.BlockID(rapid.Uint32().Draw(t, "block"))
	}), 0, 5), 0, 3).Draw(t, "blocks"))
}

func drawDigest(t *rapid.T) (d Digest) {
	copy(d[:], rapid.SliceOfN(rapid.Byte(), len(d), len(d)).Draw(t, "digest"))
	return d
}

func drawPeer(t *rapid.T) PeerAddr {
	return PeerAddr{Engine: kv.EngineID(drawID(t)), Host: drawID(t), Port: rapid.Int().Draw(t, "port"),
		TP: rapid.Int().Draw(t, "tp"), PP: rapid.Int().Draw(t, "pp")}
}

func drawError(t *rapid.T) *Error {
	if rapid.Bool().Draw(t, "ok") {
		return nil
	}
	return &Error{Request: kv.RequestID(drawID(t)), Peer: kv.EngineID(drawID(t)), Phase: Phase(drawID(t)), Reason: drawID(t)}
}

func some[T any](t *rapid.T, name string, one func(*rapid.T) T) []T {
	return rapid.SliceOfN(rapid.Custom(one), 0, 4).Draw(t, name)
}

func drawIDs(t *rapid.T) []kv.RequestID {
	return some(t, "ids", func(t *rapid.T) kv.RequestID { return kv.RequestID(drawID(t)) })
}

func drawRegistration(t *rapid.T) Registration {
	return Registration{ID: kv.RequestID(drawID(t)), TransferID: kv.TransferID(drawID(t)), Blocks: drawBlocks(t),
		StartToken: rapid.Int().Draw(t, "start"), NumTokens: rapid.Int().Draw(t, "tokens"), Digest: drawDigest(t), Peer: drawPeer(t),
		Lease: kv.Generation(rapid.Uint64().Draw(t, "lease"))}
}

func drawMeta(t *rapid.T) StepMeta {
	return StepMeta{
		Registrations: some(t, "registrations", drawRegistration),
		Reads: some(t, "reads", func(t *rapid.T) Read {
			return Read{Registration: drawRegistration(t), Remote: kv.RequestID(drawID(t)), RemoteBlocks: drawBlocks(t),
				Readers: rapid.Int().Draw(t, "readers"), Earlier: rapid.Bool().Draw(t, "earlier"),
				Expiry: rapid.Ptr(rapid.Float64(), true).Draw(t, "expiry")}
		}),
		Queued: some(t, "queued", func(t *rapid.T) QueuedRequest {
			return QueuedRequest{ID: kv.RequestID(drawID(t)), TransferID: kv.TransferID(drawID(t)), Digest: drawDigest(t)}
		}),
		Processing: drawIDs(t),
		Finished: some(t, "finished", func(t *rapid.T) FinishedBlocks {
			return FinishedBlocks{ID: kv.RequestID(drawID(t)), TransferID: kv.TransferID(drawID(t)), Blocks: drawBlocks(t),
				NumTokens: rapid.Int().Draw(t, "tokens"), Lease: time.Duration(rapid.Int64().Draw(t, "lease")), Digest: drawDigest(t),
				Generation: kv.Generation(rapid.Uint64().Draw(t, "generation")), Earlier: rapid.Bool().Draw(t, "earlier"),
				Prefixes: some(t, "prefixes", drawDigest)}
		}),
		Dropped: some(t, "dropped", func(t *rapid.T) DroppedRequest {
			return DroppedRequest{ID: kv.RequestID(drawID(t)), TransferID: kv.TransferID(drawID(t)), Reason: drawID(t)}
		}),
		Released: some(t, "released", func(t *rapid.T) Release {
			return Release{ID: kv.RequestID(drawID(t)), Lease: kv.Generation(rapid.Uint64().Draw(t, "lease"))}
		}),
		Cancels: drawIDs(t),
		Withdrawn: some(t, "withdrawn", func(t *rapid.T) Withdrawal {
			return Withdrawal{ID: kv.RequestID(drawID(t)), TransferID: kv.TransferID(drawID(t)), Remote: kv.RequestID(drawID(t)),
				Digest: drawDigest(t), Peer: drawPeer(t), Readers: rapid.Int().Draw(t, "readers"), Reason: drawID(t)}
		}),
		Heartbeats: some(t, "heartbeats", func(t *rapid.T) HeartbeatGroup {
			return HeartbeatGroup{Peer: drawPeer(t), IDs: drawIDs(t)}
		}),
		HasHeartbeats: rapid.Bool().Draw(t, "has heartbeats"),
	}
}

func drawOutput(t *rapid.T) WorkerOutput {
	return WorkerOutput{
		Rank: kv.Rank{PP: rapid.Int().Draw(t, "pp"), TP: rapid.Int().Draw(t, "tp")},
		Sent: some(t, "sent", func(t *rapid.T) SentReport {
			return SentReport{ID: kv.RequestID(drawID(t)), Err: drawError(t)}
		}),
		Recv: some(t, "recv", func(t *rapid.T) ReceiveReport {
			return ReceiveReport{ID: kv.RequestID(drawID(t)), Err: drawError(t), Transfer: TransferFacts{
				Blocks: rapid.Int().Draw(t, "blocks"), Bytes: rapid.Int64().Draw(t, "bytes"), Took: time.Duration(rapid.Int64().Draw(t, "took")),
				Waited: time.Duration(rapid.Int64().Draw(t, "waited")), Transport: drawID(t), Why: drawID(t)}}
		}),
		Progress: drawIDs(t),
	}
}

// What one half says is what the other half hears.
func TestStepMetaRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawMeta(t)
		b, err := AppendStepMeta([]byte("before"), &want)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeStepMeta(bytes.TrimPrefix(b, []byte("before")))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
			t.Fatal(d)
		}
	})
}

func TestWorkerOutputRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawOutput(t)
		b, err := AppendWorkerOutput(nil, &want)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeWorkerOutput(b)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
			t.Fatal(d)
		}
	})
}

// A value cut short, or with something behind it, is never taken for another one.
func TestBoundaryRefusesCutInput(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawMeta(t)
		b, err := AppendStepMeta(nil, &m)
		if err != nil {
			t.Fatal(err)
		}
		cut := rapid.IntRange(0, len(b)-1).Draw(t, "cut")
		var bad *BoundaryError
		if _, err := DecodeStepMeta(b[:cut]); !errors.As(err, &bad) {
			t.Fatalf("%d of %d bytes: %v", cut, len(b), err)
		}
		if _, err := DecodeStepMeta(append(b, 0)); !errors.As(err, &bad) {
			t.Fatalf("one byte too many: %v", err)
		}
	})
}

// A list header that announces more than the input can hold costs no memory.
func TestBoundaryHugeLists(t *testing.T) {
	for name, b := range map[string][]byte{
		"list":   {0x97, 0xdd, 0xff, 0xff, 0xff, 0xff},
		"fields": {0xdd, 0xff, 0xff, 0xff, 0xff},
		"text":   {0x97, 0x90, 0x91, 0xdb, 0xff, 0xff, 0xff, 0xff},
	} {
		if n := testing.AllocsPerRun(10, func() {
			if _, err := DecodeStepMeta(b); err == nil {
				t.Errorf("%s: accepted", name)
			}
		}); n > 20 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func TestBoundaryTexts(t *testing.T) {
	for name, id := range map[string]string{"not UTF-8": "\xff", "too long": strings.Repeat("x", maxBoundaryText+1)} {
		m := StepMeta{Cancels: []kv.RequestID{kv.RequestID(id)}}
		if _, err := AppendStepMeta(nil, &m); err == nil {
			t.Errorf("%s: encoded", name)
		}
	}
}

func FuzzDecodeStepMeta(f *testing.F) {
	m := StepMeta{
		Registrations: []Registration{{ID: "d", TransferID: "t", Blocks: kv.BlockIDs{{1, 2}, {}}, StartToken: 4, NumTokens: 9,
			Peer: PeerAddr{"p", "host", 5600, 1, 1}}},
		Processing: []kv.RequestID{"a"}, Finished: []FinishedBlocks{{ID: "p", Blocks: kv.BlockIDs{{3}}, Lease: time.Second}},
		Dropped: []DroppedRequest{{"x", "t", "why"}}, Cancels: []kv.RequestID{"c"},
		Heartbeats: []HeartbeatGroup{{PeerAddr{"p", "host", 5600, 1, 1}, []kv.RequestID{"d"}}}, HasHeartbeats: true,
	}
	seed, err := AppendStepMeta(nil, &m)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeStepMeta(b)
		if err != nil {
			return
		}
		again, err := AppendStepMeta(nil, &m)
		if err != nil {
			t.Fatalf("decoded %x, cannot encode: %v", b, err)
		}
		if m2, err := DecodeStepMeta(again); err != nil || !cmp.Equal(m, m2) {
			t.Fatalf("not stable: %v", err)
		}
	})
}

func FuzzDecodeWorkerOutput(f *testing.F) {
	o := WorkerOutput{Rank: kv.Rank{TP: 1}, Sent: []SentReport{{ID: "p"}, {"q", &Error{"q", "e", PhaseLease, "over"}}},
		Recv: []ReceiveReport{{ID: "d", Transfer: TransferFacts{Blocks: 1, Bytes: 2, Took: 3, Waited: 4, Transport: "tcp", Why: "only one"}}}}
	seed, err := AppendWorkerOutput(nil, &o)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := DecodeWorkerOutput(b)
		if err != nil {
			return
		}
		again, err := AppendWorkerOutput(nil, &o)
		if err != nil {
			t.Fatalf("decoded %x, cannot encode: %v", b, err)
		}
		if o2, err := DecodeWorkerOutput(again); err != nil || !cmp.Equal(o, o2) {
			t.Fatalf("not stable: %v", err)
		}
	})
}
