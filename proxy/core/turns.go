package core

import (
	"bytes"
	"container/list"
	"crypto/sha256"
	"encoding/binary"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

// conversationField names the conversation of a request; no engine is sent it (proxy.md, section 1.4).
const conversationField = "conversation_id"

// Conversation names a conversation of one client; the zero value is none. Requests that differ in what KV
// depends on besides tokens, or in who sends them, are of different ones.
type Conversation [sha256.Size]byte

// TakeConversation takes the conversation out of a client's body, as far as it names one. Whoever sends
// another Authorization, asks another model or has another cache salt is in another conversation, whatever
// it calls it.
func TakeConversation(body *openai.Object, authorization string) (c Conversation, err error) {
	raw := body.Present(conversationField)
	if raw != nil && (raw[0] != '"' || len(raw) < 3 || len(raw) > maxConversationID) {
		return c, &openai.Error{
			Status: 400, Type: openai.TypeInvalidRequest, Param: conversationField, Code: openai.CodeInvalidValue,
			Message: "conversation_id must be a text that is not empty and has at most 1024 bytes as written.",
		}
	}
	if body.Raw(conversationField) != nil {
		body.Delete(conversationField)
	}
	if raw == nil {
		return c, nil
	}
	h := sha256.New()
	for _, part := range [][]byte{raw, []byte(authorization), body.Present("model"), body.Present("cache_salt")} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write(part)
	}
	return Conversation(h.Sum(nil)), nil
}

// Turn is what a decode engine keeps of a turn, as a prefill engine needs it. The zero value is none.
type Turn struct {
	Engine string // the decode engine, as the router calls it
	// Header is what engines, or what stands before them, want to see of the turn's client: its key. It goes
	// along with what D is told of the turn later, when there is no request, and is kept as long as the turn.
	Header map[string][]string
	raw    []byte
	params kv.TransferParams
}

// Kept tells whether anything is kept.
func (t Turn) Kept() bool { return t.raw != nil }

// size is about how many bytes a turn takes.
func (t Turn) size() int {
	n := len(t.raw)
	for name, values := range t.Header {
		n += len(name)
		for _, v := range values {
			n += len(v)
		}
	}
	return n
}

// withTransferID is what a prefill leg says of it. Everything else is as D has written it.
func (t Turn) withTransferID(id kv.TransferID) []byte {
	o, err := openai.ParseObject(t.raw)
	if err != nil { // TakeTurn has parsed it
		panic("proxy: a turn's parameters are not JSON: " + err.Error())
	}
	o.Set("transfer_id", appendString(nil, string(id)))
	return o.Bytes()
}

// Releasable tells whether D has said how it is told that there will be no next turn.
func (t Turn) Releasable() bool { return t.Kept() && releasable(&t.params) }

// ReleaseBody is what D's /kv/release is sent for that.
func (t Turn) ReleaseBody() []byte { return releaseBody(&t.params) }

var paramsKey = []byte(`"kv_transfer_params"`)

// TakeTurn takes what D keeps out of its answer, or a chunk of it: a client has no use for hosts and
// blocks. What no prefill engine could use is taken out as well, and is none.
func TakeTurn(answer []byte) ([]byte, Turn) {
	if !bytes.Contains(answer, paramsKey) {
		return answer, Turn{}
	}
	o, err := openai.ParseObject(answer)
	if err != nil {
		return answer, Turn{}
	}
	raw := o.Present("kv_transfer_params")
	if raw == nil {
		return answer, Turn{}
	}
	raw = bytes.Clone(raw)
	o.Delete("kv_transfer_params")
	p, err := wire.ParseTransferParams(raw)
	if err != nil || p.RemoteBlockIDs.Len() == 0 || wire.CheckLeg(&p, kv.Pull, wire.PrefillLeg) != nil {
		return o.Bytes(), Turn{}
	}
	return o.Bytes(), Turn{raw: raw, params: p}
}

// TakeTurnEvents does the same with whole events of D's stream.
func TakeTurnEvents(events []byte) ([]byte, Turn) {
	var turn Turn
	if !bytes.Contains(events, paramsKey) {
		return events, turn
	}
	var out []byte
	var reader openai.EventReader
	err := reader.Feed(events, func(ev openai.Event) error {
		raw := ev.Raw
		edited, t := TakeTurn(ev.Data)
		if !bytes.Equal(edited, ev.Data) {
			raw = bytes.Replace(raw, ev.Data, edited, 1)
		}
		if t.Kept() {
			turn = t
		}
		out = append(out, raw...)
		return nil
	})
	if err != nil {
		return events, Turn{}
	}
	return append(out, reader.Pending()...), turn
}

// Turns is what decode engines keep of conversations: of each its last turn, good for one request, for a
// time. It has an owner, and no clock.
type Turns struct {
	ttl   time.Duration
	by    map[Conversation]*list.Element
	order list.List // of *keptTurn, the oldest first
	size  int       // of all
}

type keptTurn struct {
	conversation Conversation
	turn         Turn
	until        time.Time
}

// NewTurns makes an empty table. A turn is worth nothing after ttl, which must be below the time that
// decode engines keep their blocks.
func NewTurns(ttl time.Duration) *Turns {
	return &Turns{ttl: ttl, by: map[Conversation]*list.Element{}}
}

// Put keeps a conversation's turn. It returns those that are not kept any more: an earlier one of the
// conversation, expired ones, and the oldest if there are too many.
func (t *Turns) Put(now time.Time, c Conversation, turn Turn) (dropped []Turn) {
	if e := t.by[c]; e != nil {
		dropped = append(dropped, t.drop(e))
	}
	t.by[c] = t.order.PushBack(&keptTurn{c, turn, now.Add(t.ttl)})
	t.size += turn.size()
	return append(dropped, t.expire(now)...)
}

// Take takes a conversation's turn out: it is for one request, however that ends. dropped are expired
// ones.
func (t *Turns) Take(now time.Time, c Conversation) (turn Turn, dropped []Turn) {
	dropped = t.expire(now)
	if e := t.by[c]; e != nil {
		turn = t.drop(e)
	}
	return turn, dropped
}

// TakeAll takes every turn out, the newest first.
func (t *Turns) TakeAll() []Turn {
	var all []Turn
	for e := t.order.Back(); e != nil; e = t.order.Back() {
		all = append(all, t.drop(e))
	}
	return all
}

// Forget takes a turn out that is still the conversation's, and tells whether it was.
func (t *Turns) Forget(c Conversation, turn Turn) bool {
	e := t.by[c]
	if e == nil || !bytes.Equal(e.Value.(*keptTurn).turn.raw, turn.raw) {
		return false
	}
	t.drop(e)
	return true
}

// Len is how many conversations have one.
func (t *Turns) Len() int { return len(t.by) }

func (t *Turns) expire(now time.Time) (dropped []Turn) {
	for e := t.order.Front(); e != nil; e = t.order.Front() {
		if now.Before(e.Value.(*keptTurn).until) && len(t.by) <= maxTurns && t.size <= maxTurnBytes {
			break
		}
		dropped = append(dropped, t.drop(e))
	}
	return dropped
}

func (t *Turns) drop(e *list.Element) Turn {
	k := t.order.Remove(e).(*keptTurn)
	delete(t.by, k.conversation)
	t.size -= k.turn.size()
	return k.turn
}
