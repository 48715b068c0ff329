package core

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/openai"
)

// keptParams is what a decode engine answers that keeps its KV, with a key that nobody knows.
const keptParams = `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[4,5]],"remote_engine_id":"engined",` +
	`"remote_request_id":"cmpl-1-0-98a6d2fc","remote_host":"10.0.0.2","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,` +
	`"remote_num_tokens":29,"remote_blocks_expiry_time":480.25,"transfer_mode":"pull","kvferry_lease":12,"unknown":[1.50]}`

func TestTakeTurn(t *testing.T) {
	body, turn := TakeTurn([]byte(`{ "id":"x", "choices":[], "kv_transfer_params": ` + keptParams + `, "usage":{"n":1.0} }`))
	if d := cmp.Diff(`{ "id":"x", "choices":[], "usage":{"n":1.0} }`, string(body)); d != "" || !turn.Kept() {
		t.Errorf("%s %+v", d, turn)
	}
	got := string(PrefillBody(ChatCompletions, object(t, `{"messages":[],"max_tokens":9}`), "xfer-1", turn))
	want := `{"messages":[],"max_tokens":1,"stream":false,"kv_transfer_params":` + strings.TrimSuffix(keptParams, "}") + `,"transfer_id":"xfer-1"}}`
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for _, same := range []string{`{"id":"x","kv_transfer_params":null}`, `{"id":"about \"kv_transfer_params\""}`, `not "kv_transfer_params" JSON`} {
		if body, turn := TakeTurn([]byte(same)); string(body) != same || turn.Kept() {
			t.Errorf("%s became %s, %+v", same, body, turn)
		}
	}
	for _, bad := range []string{
		`{}`, `7`, strings.Replace(keptParams, "[[4,5]]", "[[]]", 1), strings.Replace(keptParams, `"remote_host":"10.0.0.2",`, "", 1),
		strings.Replace(keptParams, `"do_remote_decode":true`, `"do_remote_decode":false`, 1), strings.Replace(keptParams, "5600", `"x"`, 1),
	} {
		if body, turn := TakeTurn([]byte(`{"id":"x","kv_transfer_params":` + bad + `}`)); string(body) != `{"id":"x"}` || turn.Kept() {
			t.Errorf("%s: %s, %+v", bad, body, turn)
		}
	}
}

func TestTakeTurnEvents(t *testing.T) {
	const before = "data: {\"id\":\"x\",\"choices\":[{\"text\":\"a\"}]}\n\n: ping\n\n"
	const after = "data: {\"id\":\"x\",\"usage\":{}}\n\ndata: [DONE]\n\n"
	events := before + "data: {\"id\":\"x\",\"choices\":[{\"finish_reason\":\"stop\"}],\"kv_transfer_params\":" + keptParams + "}\n\n" + after
	got, turn := TakeTurnEvents([]byte(events))
	if d := cmp.Diff(before+"data: {\"id\":\"x\",\"choices\":[{\"finish_reason\":\"stop\"}]}\n\n"+after, string(got)); d != "" || string(turn.raw) != keptParams {
		t.Errorf("%s %+v", d, turn)
	}
	if got, turn := TakeTurnEvents([]byte(before)); string(got) != before || turn.Kept() {
		t.Errorf("%s %+v", got, turn)
	}
}

func TestTakeConversation(t *testing.T) {
	take := func(body, authorization string) (Conversation, string) {
		t.Helper()
		o := object(t, body)
		c, err := TakeConversation(o, authorization)
		if err != nil {
			t.Fatal(err)
		}
		return c, string(o.Bytes())
	}
	one, left := take(`{ "model":"m", "conversation_id":"a", "prompt":"x" }`, "")
	if left != `{ "model":"m", "prompt":"x" }` || one == (Conversation{}) {
		t.Errorf("%s", left)
	}
	if again, _ := take(`{"prompt":"another","model":"m","conversation_id":"a"}`, ""); again != one {
		t.Error("the next turn is in another conversation")
	}
	for _, other := range [][2]string{
		{`{"model":"m","conversation_id":"b"}`, ""}, {`{"model":"n","conversation_id":"a"}`, ""}, {`{"conversation_id":"a"}`, ""},
		{`{"model":"m","conversation_id":"a","cache_salt":"s"}`, ""}, {`{"model":"m","conversation_id":"a"}`, "Bearer x"},
	} {
		if c, _ := take(other[0], other[1]); c == one || c == (Conversation{}) {
			t.Errorf("%v is in the same conversation, or in none", other)
		}
	}
	shifted, _ := take(`{"conversation_id":"a"}`, `Bearer x"m"`)
	if straight, _ := take(`{"model":"m","conversation_id":"a"}`, "Bearer x"); straight == shifted {
		t.Error("a client's words pass for another's when they are cut elsewhere")
	}
	for _, none := range []string{`{"prompt":"x"}`, `{"prompt":"x","conversation_id":null}`} {
		if c, left := take(none, ""); c != (Conversation{}) || left != `{"prompt":"x"}` {
			t.Errorf("%s: %s", none, left)
		}
	}
	for _, bad := range []string{`7`, `""`, `["a"]`, `"` + strings.Repeat("x", 1100) + `"`} {
		if _, err := TakeConversation(object(t, `{"conversation_id":`+bad+`}`), ""); err == nil || err.(*openai.Error).Param != "conversation_id" {
			t.Errorf("%.20s: %v", bad, err)
		}
	}
}

// TestTurns compares a table with a list that is looked through from the start: whatever is put in comes out
// once, by Take or as dropped, and none after its time.
func TestTurns(t *testing.T) {
	type entry struct {
		c     Conversation
		turn  Turn
		until time.Time
	}
	rapid.Check(t, func(t *rapid.T) {
		const ttl = 10 * time.Second
		table, now := NewTurns(ttl), time.Unix(0, 0)
		var list []entry
		expire := func() (old []string) {
			list = slices.DeleteFunc(list, func(e entry) bool {
				if now.Before(e.until) {
					return false
				}
				old = append(old, string(e.turn.raw))
				return true
			})
			return old
		}
		names := func(turns []Turn) (out []string) {
			for _, x := range turns {
				out = append(out, string(x.raw))
			}
			return out
		}
		for i := range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 4).Draw(t, "seconds")) * time.Second)
			c := Conversation{byte(rapid.IntRange(1, 4).Draw(t, "conversation"))}
			at := func() int { return slices.IndexFunc(list, func(e entry) bool { return e.c == c }) }
			var want, got []string
			if rapid.Bool().Draw(t, "put") {
				if j := at(); j >= 0 {
					want = append(want, string(list[j].turn.raw))
					list = slices.Delete(list, j, j+1)
				}
				turn := Turn{raw: fmt.Append(nil, "turn ", i)}
				list = append(list, entry{c, turn, now.Add(ttl)})
				want = append(want, expire()...)
				got = names(table.Put(now, c, turn))
				if rapid.IntRange(0, 3).Draw(t, "forget") == 0 {
					if table.Forget(c, Turn{raw: []byte("another")}) || !table.Forget(c, turn) || table.Forget(c, turn) {
						t.Fatal("it forgets what it was not told to, or not what it was")
					}
					list = list[:len(list)-1]
				}
			} else {
				want = expire()
				taken, dropped := table.Take(now, c)
				got = names(dropped)
				j := at()
				if taken.Kept() != (j >= 0) || j >= 0 && string(taken.raw) != string(list[j].turn.raw) {
					t.Fatalf("%d is taken out: %s", c[0], taken.raw)
				}
				if j >= 0 {
					list = slices.Delete(list, j, j+1)
				}
			}
			if !slices.Equal(got, want) || table.Len() != len(list) {
				t.Fatalf("dropped %v, want %v; %d left, want %d", got, want, table.Len(), len(list))
			}
		}
		var want []string
		for _, e := range slices.Backward(list) {
			want = append(want, string(e.turn.raw))
		}
		if got := names(table.TakeAll()); !slices.Equal(got, want) || table.Len() != 0 || table.size != 0 {
			t.Fatalf("all are %v, want %v; %d left of %d bytes", got, want, table.Len(), table.size)
		}
	})
}

// TestTurnsAreBounded: beyond its bounds a table forgets the oldest.
func TestTurnsAreBounded(t *testing.T) {
	table, now := NewTurns(time.Hour), time.Unix(0, 0)
	put := func(i, size int) []Turn {
		return table.Put(now, Conversation{byte(i), byte(i >> 8), byte(i >> 16)}, Turn{Engine: fmt.Sprint(i), raw: make([]byte, size)})
	}
	for i := range maxTurns {
		if dropped := put(i, 1); dropped != nil {
			t.Fatalf("%d: %v", i, dropped)
		}
	}
	if dropped := put(maxTurns, 1); len(dropped) != 1 || dropped[0].Engine != "0" {
		t.Errorf("%d dropped", len(dropped))
	}
	if dropped := put(maxTurns+1, maxTurnBytes-2); len(dropped) != maxTurns-2 || table.Len() != 3 {
		t.Errorf("%d dropped, %d left", len(dropped), table.Len())
	}
	key := map[string][]string{"Authorization": {strings.Repeat("k", maxTurnBytes/2)}}
	for i, want := range []int{3, 1} { // keys count
		if dropped := table.Put(now, Conversation{0xff, byte(i)}, Turn{Header: key, raw: []byte("x")}); len(dropped) != want || table.Len() != 1 {
			t.Errorf("%d dropped, %d left", len(dropped), table.Len())
		}
	}
}
