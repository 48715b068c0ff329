package wire

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/kv"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"
)

func someBeat() *Beat {
	return &Beat{7, Sender{"D", "d", 5600, 2}, []kv.RequestID{"x", "cmpl-a-0"}, []RegistrationRef{{"cmpl-a-0-dddddddd", 3, Token{9}}}}
}

func someControls() []Notification {
	ref := RegistrationRef{"cmpl-a-0-dddddddd", 3, Token{9}}
	return []Notification{
		someBeat(),
		&Beat{Seq: 1, From: Sender{"D", "d", 1, 1}},
		&States{7, 3, []StateAnswer{{ref, StateRunning}, {RegistrationRef{"b", 4, Token{}}, StateUnknown}}},
		&States{},
		&Cancel{Seq: 8, From: Sender{"D", "d", 5600, 1}, RegistrationRef: ref, Receipt: Token{8}, Reason: "the client went away"},
		&Cancel{9, Token{7}, Sender{"D", "d", 5600, 1}, RegistrationRef{ID: "cmpl-a-0-dddddddd"}, "x", "R", [32]byte{1}, ""},
		&Failed{1, Token{6}, ref, "prefill", "the prefill ended as \"abort\""},
		&Ack{9, Token{7}},
		someClaim(),
		&ReadDone{ref},
		&Claimed{4, ref, [16]byte{1, 2}},
	}
}

func someClaim() *Claim {
	return &Claim{Seq: 4, From: Sender{"D", "d", 80, 1}, RegistrationRef: RegistrationRef{"b", 4, Token{5}}, Lease: 9, Tokens: 33, Readers: 1,
		Digest: [32]byte{1}, Blocks: [32]byte{2}}
}

// The bytes of each kind, so that a change of them is seen.
func TestControlBytes(t *testing.T) {
	zeros := strings.Repeat("\x00", 15)
	for _, c := range []struct {
		n    Notification
		want string
	}{
		{someClaim(), "KVFERRY:\x8e\xa4kind\xa5claim\xa3seq\x04\xa6engine\xa1D\xa4host\xa1d\xa4port\x50\xa2tp\x01\xa2id\xa1b\xaageneration\x04\xa5token\xc4\x10\x05" + zeros +
			"\xa5lease\x09\xa6tokens\x21\xa7readers\x01\xa6digest\xc4\x20\x01" + strings.Repeat("\x00", 31) + "\xa6blocks\xc4\x20\x02" + strings.Repeat("\x00", 31)},
		{&Claimed{4, RegistrationRef{"b", 4, Token{5}}, [16]byte{1}},
			"KVFERRY:\x86\xa4kind\xa7claimed\xa3seq\x04\xa2id\xa1b\xaageneration\x04\xa5token\xc4\x10\x05" + zeros + "\xa5grant\xc4\x10\x01" + zeros},
		{&ReadDone{RegistrationRef{"b", 4, Token{5}}}, "KVFERRY:\x84\xa4kind\xa4read\xa2id\xa1b\xaageneration\x04\xa5token\xc4\x10\x05" + zeros},
		{&Ack{9, Token{7}}, "KVFERRY:\x83\xa4kind\xa3ack\xa3seq\x09\xa7receipt\xc4\x10\x07" + zeros},
		{&States{7, 3, []StateAnswer{{RegistrationRef{"b", 4, Token{5}}, StateQueued}}},
			"KVFERRY:\x84\xa4kind\xa5state\xa3seq\x07\xa5steps\x03\xa7answers\x91\x94\xa1b\x04\xc4\x10\x05" + zeros + "\xa6queued"},
		{&Failed{1, Token{6}, RegistrationRef{"b", 4, Token{5}}, "lease", "over"},
			"KVFERRY:\x88\xa4kind\xa6failed\xa3seq\x01\xa2id\xa1b\xaageneration\x04\xa5token\xc4\x10\x05" + zeros +
				"\xa7receipt\xc4\x10\x06" + zeros + "\xa5phase\xa5lease\xa6reason\xa4over"},
		{&Beat{2, Sender{"D", "d", 80, 1}, []kv.RequestID{"x"}, []RegistrationRef{{"b", 4, Token{5}}}},
			"KVFERRY:\x88\xa4kind\xa4beat\xa3seq\x02\xa6engine\xa1D\xa4host\xa1d\xa4port\x50\xa2tp\x01\xa5names\x91\xa1x\xadregistrations\x91\x93\xa1b\x04\xc4\x10\x05" + zeros},
		{&Cancel{Seq: 3, Receipt: Token{6}, From: Sender{"D", "d", 80, 1}, RegistrationRef: RegistrationRef{"b", 4, Token{5}}, TransferID: "x", Reason: "r"},
			"KVFERRY:\x8c\xa4kind\xa6cancel\xa3seq\x03\xa6engine\xa1D\xa4host\xa1d\xa4port\x50\xa2tp\x01\xa2id\xa1b\xaageneration\x04\xa5token\xc4\x10\x05" + zeros +
				"\xa7receipt\xc4\x10\x06" + zeros + "\xa6reason\xa1r\xabtransfer_id\xa1x"},
	} {
		b, err := AppendControl(nil, c.n)
		if err != nil || string(b) != c.want {
			t.Errorf("%+v: %v\n%q\n%q", c.n, err, b, c.want)
		}
		got, err := ParseNotification([]byte(c.want))
		if d := cmp.Diff(c.n, got); d != "" || err != nil {
			t.Errorf("%v %s", err, d)
		}
	}
}

func TestControlRoundTrip(t *testing.T) {
	id := rapid.Map(rapid.StringN(0, 20, MaxIDLen), func(s string) kv.RequestID { return kv.RequestID("r" + s) })
	text := rapid.StringN(0, 30, MaxName)
	gen := rapid.Custom(func(t *rapid.T) kv.Generation { return kv.Generation(rapid.Uint64Min(1).Draw(t, "generation")) })
	token := rapid.Custom(func(t *rapid.T) (x Token) {
		x[15] = rapid.Byte().Draw(t, "token")
		return x
	})
	ref := rapid.Custom(func(t *rapid.T) RegistrationRef {
		return RegistrationRef{id.Draw(t, "id"), gen.Draw(t, "gen"), token.Draw(t, "token")}
	})
	sender := rapid.Custom(func(t *rapid.T) Sender {
		return Sender{kv.EngineID(id.Draw(t, "engine")), "h" + text.Draw(t, "host"), rapid.IntRange(1, 65535).Draw(t, "port"), rapid.IntRange(1, MaxRanks).Draw(t, "tp")}
	})
	answer := rapid.Custom(func(t *rapid.T) StateAnswer {
		return StateAnswer{ref.Draw(t, "ref"), rapid.SampledFrom(requestStates[:]).Draw(t, "state")}
	})
	digest := rapid.Custom(func(t *rapid.T) (d [32]byte) {
		d[31] = rapid.Byte().Draw(t, "digest")
		return d
	})
	rapid.Check(t, func(t *rapid.T) {
		seq := rapid.Uint64Min(1).Draw(t, "seq")
		for _, want := range []Notification{
			&Beat{seq, sender.Draw(t, "from"), rapid.SliceOfN(id, 0, 4).Draw(t, "names"), rapid.SliceOfN(ref, 0, 4).Draw(t, "registrations")},
			&States{seq - 1, seq / 2, rapid.SliceOfN(answer, 0, 4).Draw(t, "answers")},
			&Cancel{seq, token.Draw(t, "receipt"), sender.Draw(t, "from"), RegistrationRef{id.Draw(t, "id"), kv.Generation(seq - 1), token.Draw(t, "token")}, kv.TransferID(text.Draw(t, "transfer")), id.Draw(t, "remote"),
				digest.Draw(t, "digest"), BoundReason(text.Draw(t, "reason"))},
			&Failed{seq, token.Draw(t, "receipt"), ref.Draw(t, "ref"), text.Draw(t, "phase"), text.Draw(t, "reason")},
			&Ack{seq, token.Draw(t, "receipt")},
			&Claim{seq, sender.Draw(t, "from"), ref.Draw(t, "ref"), kv.Generation(seq - 1), rapid.IntRange(1, MaxTokens).Draw(t, "tokens"),
				rapid.IntRange(1, MaxReaders).Draw(t, "readers"), digest.Draw(t, "digest"), digest.Draw(t, "blocks")},
			&ReadDone{ref.Draw(t, "ref")},
			&Claimed{seq, ref.Draw(t, "ref"), [16]byte{byte(seq)}},
		} {
			b, err := AppendControl([]byte("before"), want)
			if err != nil {
				t.Fatalf("%+v: %v", want, err)
			}
			got, err := ParseNotification(b[len("before"):])
			if d := cmp.Diff(want, got, cmpEmpty); d != "" || err != nil {
				t.Fatalf("%v %s", err, d)
			}
			cut := rapid.IntRange(len(prefixControl), len(b)-len("before")-1).Draw(t, "cut")
			if n, err := ParseNotification(b[len("before") : len("before")+cut]); err == nil {
				t.Fatalf("%d of %d bytes are taken for %+v", cut, len(b)-len("before"), n)
			}
		}
	})
}

// cmpEmpty takes an empty list for nil.
var cmpEmpty = cmp.FilterValues(func(a, b any) bool { return emptyList(a) && emptyList(b) }, cmp.Comparer(func(_, _ any) bool { return true }))

func emptyList(v any) bool {
	switch v := v.(type) {
	case []kv.RequestID:
		return len(v) == 0
	case []RegistrationRef:
		return len(v) == 0
	case []StateAnswer:
		return len(v) == 0
	}
	return false
}

func TestControlRefusals(t *testing.T) {
	good := someBeat()
	for name, c := range map[string]struct {
		change func(*Beat)
		kind   error
	}{
		"seq":        {func(b *Beat) { b.Seq = 0 }, ErrRange},
		"engine":     {func(b *Beat) { b.From.Engine = "" }, ErrRange},
		"host":       {func(b *Beat) { b.From.Host = strings.Repeat("h", MaxHostLen+1) }, ErrLimit},
		"port":       {func(b *Beat) { b.From.Port = 70000 }, ErrRange},
		"tp":         {func(b *Beat) { b.From.TP = 0 }, ErrRange},
		"name":       {func(b *Beat) { b.Names = []kv.RequestID{""} }, ErrRange},
		"generation": {func(b *Beat) { b.Registrations = []RegistrationRef{{"a", 0, Token{}}} }, ErrRange},
		"prefix":     {func(b *Beat) { b.Registrations = []RegistrationRef{{"KVFERRY:a", 1, Token{}}} }, ErrRange},
		"many":       {func(b *Beat) { b.Names = make([]kv.RequestID, MaxControlEntries+1) }, ErrLimit},
	} {
		b := *good
		c.change(&b)
		if out, err := AppendControl([]byte("x"), &b); !errors.Is(err, c.kind) || string(out) != "x" {
			t.Errorf("%s: %q, %v", name, out, err)
		}
	}
	for name, change := range map[string]func(*Claim){
		"tokens":     func(c *Claim) { c.Tokens = 0 },
		"readers":    func(c *Claim) { c.Readers = MaxReaders + 1 },
		"generation": func(c *Claim) { c.Generation = 0 },
		"engine":     func(c *Claim) { c.From.Engine = "" },
	} {
		c := *someClaim()
		change(&c)
		if _, err := AppendControl(nil, &c); !errors.Is(err, ErrRange) {
			t.Errorf("a claim's %s: %v", name, err)
		}
	}
	for name, c := range map[string]struct {
		text string
		kind error
	}{
		"no map":         {"KVFERRY:", ErrSyntax},
		"no kind":        {"KVFERRY:\x81\xa3seq\x01", ErrMissing},
		"unknown kind":   {"KVFERRY:\x82\xa4kind\xa1x\xa3seq\x01", ErrRange},
		"no seq":         {"KVFERRY:\x81\xa4kind\xa3ack", ErrMissing},
		"no receipt":     {"KVFERRY:\x82\xa4kind\xa3ack\xa3seq\x01", ErrMissing},
		"short receipt":  {"KVFERRY:\x83\xa4kind\xa3ack\xa3seq\x01\xa7receipt\xc4\x01\x07", ErrRange},
		"twice":          {"KVFERRY:\x83\xa4kind\xa3ack\xa3seq\x01\xa3seq\x02", ErrSyntax},
		"another's key":  {"KVFERRY:\x84\xa4kind\xa3ack\xa3seq\x01\xa7receipt\xc4\x10" + strings.Repeat("r", 16) + "\xa6reason\xa1r", ErrRange},
		"float":          {"KVFERRY:\x82\xa4kind\xa3ack\xa3seq\xca\x00\x00\x00\x00", ErrType},
		"more":           {"KVFERRY:\x82\xa4kind\xa3ack\xa3seq\x01\x00", ErrSyntax},
		"state":          {"KVFERRY:\x84\xa4kind\xa5state\xa3seq\x07\xa5steps\x01\xa7answers\x91\x94\xa1b\x04\xc4\x10" + strings.Repeat("t", 16) + "\xa4gone", ErrRange},
		"no steps":       {"KVFERRY:\x83\xa4kind\xa5state\xa3seq\x07\xa7answers\x90", ErrMissing},
		"short answer":   {"KVFERRY:\x83\xa4kind\xa5state\xa3seq\x07\xa7answers\x91\x92\xa1b\x04", ErrRange},
		"huge":           {"KVFERRY:\x83\xa4kind\xa5state\xa3seq\x07\xa7answers\xdd\xff\xff\xff\xff", ErrSyntax},
		"too many bytes": {"KVFERRY:" + strings.Repeat("x", MaxControl), ErrLimit},
	} {
		n, err := ParseNotification([]byte(c.text))
		if !errors.Is(err, c.kind) || n != nil {
			t.Errorf("%s: %v, %v", name, n, err)
		}
	}
	if _, err := AppendControl(nil, Completion{"a", 1}); err == nil {
		t.Error("a completion is taken for a control message")
	}
	if got, err := ParseNotification([]byte("KVFERRY:\x84\xa4kind\xa3ack\xa5later\x92\x01\x02\xa3seq\x09\xa7receipt\xc4\x10" + strings.Repeat("\x01", 16))); err != nil || *got.(*Ack) != (Ack{9, Token([]byte(strings.Repeat("\x01", 16)))}) {
		t.Errorf("an unknown key: %v, %v", got, err)
	}
}

func TestBlocksDigest(t *testing.T) {
	seen := map[[32]byte]string{}
	for _, ids := range []kv.BlockIDs{nil, {{}}, {{1}}, {{1, 2}}, {{2, 1}}, {{1}, {2}}, {{}, {1, 2}}, {{1, 2}, {}}} {
		d := BlocksDigest(ids)
		if other, twice := seen[d]; twice {
			t.Errorf("%v and %s have one digest", ids, other)
		}
		seen[d] = fmt.Sprint(ids)
	}
}

func TestBoundReason(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := string(rapid.SliceOfN(rapid.SampledFrom([]byte("a\xd0\xb6\xf0\x9f\x92\xff")), 0, 2*MaxReason).Draw(t, "text"))
		if got := BoundReason(s); len(got) > MaxReason || !utf8.ValidString(got) {
			t.Fatalf("%d bytes, valid %v", len(got), utf8.ValidString(got))
		}
	})
	if s := strings.Repeat("a", MaxReason); BoundReason(s) != s || BoundReason("x") != "x" {
		t.Error("a reason that fits is changed")
	}
}

func TestControlAllocates(t *testing.T) {
	b := msgp.AppendMapHeader([]byte(prefixControl), 4)
	b = msgp.AppendString(msgp.AppendString(b, "kind"), "state")
	b = msgp.AppendInt(msgp.AppendString(b, "seq"), 1)
	b = msgp.AppendInt(msgp.AppendString(b, "steps"), 1)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "answers"), MaxControlEntries)
	for range MaxControlEntries {
		b = append(b, "\x94\xa1a\x01\xc4\x10tokentokentokent\xa4sent"...)
	}
	expectAllocated(t, "answers", len(b), func() {
		if _, err := ParseControl(b); err != nil {
			t.Error(err)
		}
	})
}

func FuzzParseControl(f *testing.F) {
	for _, n := range someControls() {
		b, err := AppendControl(nil, n)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := ParseControl(b)
		if err != nil {
			return
		}
		once, err := AppendControl(nil, n)
		if err != nil {
			t.Fatalf("%+v: %v", n, err)
		}
		again, err := ParseNotification(once)
		if d := cmp.Diff(n, again, cmpEmpty); d != "" || err != nil {
			t.Errorf("%q: %v %s", b, err, d)
		}
	})
}
