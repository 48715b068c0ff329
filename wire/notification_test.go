package wire

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/kv"
	"pgregory.net/rapid"
)

type notificationVector struct {
	Name, Kind, Text string
	Hex              hexBytes
	Map              json.RawMessage
	KeyOrder         []string `json:"key_order"`
}

func notificationVectors(t testing.TB) []notificationVector {
	var f struct{ Vectors []notificationVector }
	loadVectors(t, "notifications", &f)
	if len(f.Vectors) == 0 {
		t.Fatal("no notifications")
	}
	return f.Vectors
}

func appendNotification(t testing.TB, n Notification) []byte {
	t.Helper()
	var b []byte
	var err error
	switch n := n.(type) {
	case *PushReg:
		b, err = AppendPushReg(nil, n)
	case Heartbeat:
		b, err = AppendHeartbeat(nil, n.IDs)
	case PushFail:
		b, err = AppendPushFail(nil, n)
	case Completion:
		b, err = AppendCompletion(nil, n)
	default:
		b, err = AppendControl(nil, n)
	}
	if err != nil {
		t.Fatalf("%+v: %v", n, err)
	}
	return b
}

func TestNotificationVectors(t *testing.T) {
	for _, v := range notificationVectors(t) {
		n, err := ParseNotification(v.Hex)
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			continue
		}
		if got := appendNotification(t, n); string(got) != string(v.Hex) {
			t.Errorf("%s: encodes as %q", v.Name, got)
		}
		switch v.Kind {
		case "PUSH_REG":
			if d := cmp.Diff(pushRegOf(t, value(t, v.Map)), n); d != "" {
				t.Errorf("%s: %s", v.Name, d)
			}
			if d := cmp.Diff(pushRegKeys[:pushRegStockKeys], v.KeyOrder); d != "" {
				t.Errorf("%s: %s", v.Name, d)
			}
		case "HB":
			ids := strings.Split(strings.TrimPrefix(v.Text, "HB:"), ",")
			if d := cmp.Diff(ids, texts(n.(Heartbeat).IDs)); d != "" {
				t.Errorf("%s: %s", v.Name, d)
			}
		case "completion":
			id, digit, _ := strings.Cut(v.Text, ":")
			c := n.(Completion)
			if string(c.ID) != id || len(digit) != 1 || c.N != int(digit[0]-'0') {
				t.Errorf("%s: %+v", v.Name, c)
			}
		default:
			t.Errorf("%s: unknown kind %q", v.Name, v.Kind)
		}
	}
}

func texts(ids []kv.RequestID) []string {
	var out []string
	for _, id := range ids {
		out = append(out, string(id))
	}
	return out
}

func TestNotificationTextVectors(t *testing.T) {
	want := map[string]Notification{
		"hb_one":          Heartbeat{[]kv.RequestID{"cmpl-a-0"}},
		"hb_two":          Heartbeat{[]kv.RequestID{"cmpl-a-0", "cmpl-b-0"}},
		"completion_pull": Completion{"cmpl-a-0-0123abcd", 1},
		"completion_tp2":  Completion{"cmpl-a-0-0123abcd", 2},
	}
	for _, v := range codecVectors(t, "codec-valid", "notif_text") {
		got, err := ParseNotification(*v.Hex)
		if d := cmp.Diff(want[v.Name], got); d != "" || err != nil {
			t.Errorf("%s: %v %s", v.Name, err, d)
		}
		v.expectBytes(t, appendNotification(t, want[v.Name]))
	}
}

func TestNotificationOrder(t *testing.T) {
	for text, want := range map[string]Notification{
		"a:b:c:3":              Completion{"a:b:c", 3},
		"PUSH_FAIL:a:b:2":      PushFail{"a:b", 2},
		"HB:a:1":               Heartbeat{[]kv.RequestID{"a:1"}},
		"HB:":                  Heartbeat{},
		"HB:a,,b,":             Heartbeat{[]kv.RequestID{"a", "b"}},
		"push_fail:a:1":        Completion{"push_fail:a", 1},
		"PUSH_REGx:1":          Completion{"PUSH_REGx", 1},
		"x,y:65536":            Completion{"x,y", MaxRanks},
		"запрос-0:1":           Completion{"запрос-0", 1},
		"PUSH_FAIL:cmpl:10":    PushFail{"cmpl", 10},
		"PUSH_FAIL:PUSH_REG:1": PushFail{"PUSH_REG", 1},
	} {
		got, err := ParseNotification([]byte(text))
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%q: %v %s", text, err, d)
		}
	}
}

func TestNotificationRefusals(t *testing.T) {
	long := strings.Repeat("x", MaxIDLen+1)
	for text, kind := range map[string]error{
		"":                             ErrSyntax,
		"no colon":                     ErrSyntax,
		"a:":                           ErrSyntax,
		"a:x":                          ErrSyntax,
		"a:1.0":                        ErrSyntax,
		"a: 1":                         ErrSyntax,
		"a:+1":                         ErrSyntax,
		"a:01":                         ErrSyntax,
		"a:1_0":                        ErrSyntax,
		"a:１":                          ErrSyntax,
		"a:1\n":                        ErrSyntax,
		"a:0x1":                        ErrSyntax,
		"a:-1":                         ErrRange,
		"a:0":                          ErrRange,
		"a:65537":                      ErrRange,
		"a:99999999999999999":          ErrRange,
		"a:99999999999999999999999999": ErrSyntax,
		":1":                           ErrRange,
		"\xff\xfe:1":                   ErrSyntax,
		"HB:\xff":                      ErrSyntax,
		"PUSH_FAIL:":                   ErrSyntax,
		"PUSH_FAIL:a":                  ErrSyntax,
		"PUSH_FAIL::1":                 ErrRange,
		"PUSH_FAIL:\xff:1":             ErrSyntax,
		"PUSH_FAIL:HB:x:1":             ErrRange,
		"PUSH_REG:":                    ErrSyntax,
		long + ":1":                    ErrLimit,
		"HB:" + long:                   ErrLimit,
		"HB:" + strings.Repeat(",", MaxHeartbeatIDs): ErrLimit,
		strings.Repeat("x", 1<<20):                   ErrLimit,
	} {
		n, err := ParseNotification([]byte(text))
		var de *DecodeError
		if !errors.As(err, &de) || !errors.Is(err, kind) || n != nil {
			t.Errorf("%.40q: %v, %v", text, n, err)
		}
	}
}

func TestNotificationsThatCannotBeSent(t *testing.T) {
	for name, f := range map[string]func() ([]byte, error){
		"no ids":       func() ([]byte, error) { return AppendHeartbeat([]byte("x"), nil) },
		"empty id":     func() ([]byte, error) { return AppendHeartbeat([]byte("x"), []kv.RequestID{"a", ""}) },
		"comma":        func() ([]byte, error) { return AppendHeartbeat([]byte("x"), []kv.RequestID{"a,b"}) },
		"bad text":     func() ([]byte, error) { return AppendHeartbeat([]byte("x"), []kv.RequestID{"\xff"}) },
		"many ids":     func() ([]byte, error) { return AppendHeartbeat([]byte("x"), make([]kv.RequestID, MaxHeartbeatIDs+1)) },
		"prefix":       func() ([]byte, error) { return AppendCompletion([]byte("x"), Completion{"HB:a", 1}) },
		"no id":        func() ([]byte, error) { return AppendCompletion([]byte("x"), Completion{"", 1}) },
		"count 0":      func() ([]byte, error) { return AppendCompletion([]byte("x"), Completion{"a", 0}) },
		"count":        func() ([]byte, error) { return AppendPushFail([]byte("x"), PushFail{"a", MaxRanks + 1}) },
		"fail, prefix": func() ([]byte, error) { return AppendPushFail([]byte("x"), PushFail{"PUSH_FAIL:a", 1}) },
	} {
		if b, err := f(); err == nil || string(b) != "x" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}

func TestHeartbeatAllocates(t *testing.T) {
	for name, b := range map[string][]byte{
		"commas": []byte("HB:" + strings.Repeat(",", MaxHeartbeatIDs-1)),
		"ids":    []byte("HB:" + strings.Repeat("a,", MaxHeartbeatIDs-1)),
	} {
		expectAllocated(t, name, len(b), func() {
			if _, err := ParseNotification(b); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestNotificationRoundTrip(t *testing.T) {
	id := rapid.Map(rapid.StringN(1, 30, MaxIDLen), func(s string) kv.RequestID { return kv.RequestID("r" + s) })
	n := rapid.IntRange(1, MaxRanks)
	rapid.Check(t, func(t *rapid.T) {
		want := []Notification{
			Completion{id.Draw(t, "id"), n.Draw(t, "n")},
			PushFail{id.Draw(t, "id"), n.Draw(t, "n")},
			Heartbeat{rapid.SliceOfN(rapid.Map(id, func(id kv.RequestID) kv.RequestID {
				return kv.RequestID(strings.ReplaceAll(string(id), ",", ""))
			}), 1, 10).Draw(t, "ids")},
		}
		for _, w := range want {
			var b []byte
			var err error
			switch w := w.(type) {
			case Completion:
				b, err = AppendCompletion(nil, w)
			case PushFail:
				b, err = AppendPushFail(nil, w)
			case Heartbeat:
				b, err = AppendHeartbeat(nil, w.IDs)
			}
			if err != nil {
				t.Fatal(err)
			}
			got, err := ParseNotification(b)
			if d := cmp.Diff(w, got); d != "" || err != nil {
				t.Errorf("%v %s", err, d)
			}
		}
	})
}

func FuzzParseNotification(f *testing.F) {
	for i, v := range notificationVectors(f) {
		if i%10 == 0 || v.Kind == "HB" {
			f.Add([]byte(v.Hex))
		}
	}
	for _, s := range []string{"PUSH_FAIL:a:1", "a:01", "HB:a,,b", ":1", "PUSH_REG:"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := ParseNotification(b)
		if err != nil {
			return
		}
		if hb, ok := n.(Heartbeat); ok {
			for _, id := range hb.IDs {
				if reason, _ := badRequestID(id); reason != "" {
					return // stock tolerates it, the appender does not send it
				}
			}
			if len(hb.IDs) == 0 {
				return
			}
		}
		once := appendNotification(t, n)
		again, err := ParseNotification(once)
		if d := cmp.Diff(n, again, cmpEmpty); d != "" || err != nil {
			t.Errorf("%q: %v %s", b, err, d)
		}
		switch n.(type) {
		case Completion, PushFail:
			if string(once) != string(b) {
				t.Errorf("%q encodes as %q", b, once)
			}
		}
	})
}
