package wire

import (
	"math"

	"github.com/kvferry/kvferry/kv"
	"github.com/tinylib/msgp/msgp"
)

// PushReg is D's registration with P: where to write the KV of one request (nixl-connector.md,
// section 5.1). Every D rank sends the same bytes to every P rank.
type PushReg struct {
	RequestID      kv.RequestID // D's; echoed in the completion
	DecodeEngineID kv.EngineID
	DecodeHost     string // D's side channel
	DecodePort     int
	DecodeTPSize   int
	LocalBlockIDs  kv.BlockIDs // D's blocks that are still to be filled

	// P as D knows it. P has no use for them; zero values are sent as nil.
	RemoteEngineID kv.EngineID
	RemoteHost     string
	RemotePort     int
	RemoteTPSize   int
	RemotePPSize   int

	TransferID kv.TransferID     // left out when empty
	Extension  *PushRegExtension // left out when nil; nil from a stock peer
}

// PushRegExtension is what kvferry adds to a registration, under the key "kvferry". Stock peers
// ignore it.
type PushRegExtension struct {
	Grant        [16]byte      // D's permission to write the listed blocks
	Token        Token         // what messages about this registration bring along
	StartToken   int           // absolute position of the first token of the listed blocks
	NumTokens    int           // tokens wanted from there on
	PromptDigest [32]byte      // of the prompt's token ids, so that unlike prompts never pair
	Generation   kv.Generation // of this registration: a later one of the same id is greater
	Lease        kv.Generation // of P's hold, as the hand-off parameters tell it; 0 and left out when they do not
}

// Keys of a registration in stock order, then transfer_id and the extension.
var pushRegKeys = [...]string{"request_id", "decode_engine_id", "decode_host", "decode_port", "decode_tp_size",
	"local_block_ids", "remote_engine_id", "remote_host", "remote_port", "remote_tp_size", "remote_pp_size",
	"transfer_id", extensionKey}

const (
	extensionKey     = "kvferry"
	pushRegRequired  = 6  // the first keys, without which a registration cannot be used
	pushRegStockKeys = 11 // what release 0.32.0 sends
)

// AppendPushReg appends the whole notification, prefix included. It refuses what ParsePushReg would.
func AppendPushReg(dst []byte, p *PushReg) ([]byte, error) {
	if err := p.validate(); err != nil {
		return dst, err
	}
	n := uint32(pushRegStockKeys)
	if p.TransferID != "" {
		n++
	}
	if p.Extension != nil {
		n++
	}
	out := append(dst, prefixPushReg...)
	out = msgp.AppendMapHeader(out, n)
	for i, k := range pushRegKeys {
		if i == pushRegStockKeys && p.TransferID == "" || k == extensionKey && p.Extension == nil {
			continue
		}
		out = msgp.AppendString(out, k)
		out = p.appendField(out, i)
	}
	if len(out)-len(dst) > MaxNotification {
		return dst, textError("PUSH_REG", ErrLimit, "would be larger than a notification may be")
	}
	return out, nil
}

func (p *PushReg) appendField(b []byte, i int) []byte {
	switch i {
	case 0:
		return msgp.AppendString(b, string(p.RequestID))
	case 1:
		return msgp.AppendString(b, string(p.DecodeEngineID))
	case 2:
		return msgp.AppendString(b, p.DecodeHost)
	case 3:
		return appendInt(b, p.DecodePort)
	case 4:
		return appendInt(b, p.DecodeTPSize)
	case 5:
		return appendBlockIDs(b, p.LocalBlockIDs)
	case 6:
		return appendOptStr(b, string(p.RemoteEngineID))
	case 7:
		return appendOptStr(b, p.RemoteHost)
	case 8:
		return appendOptInt(b, p.RemotePort)
	case 9:
		return appendOptInt(b, p.RemoteTPSize)
	case 10:
		return appendOptInt(b, p.RemotePPSize)
	case 11:
		return msgp.AppendString(b, string(p.TransferID))
	}
	return p.Extension.append(b)
}

func (e *PushRegExtension) append(b []byte) []byte {
	n := uint32(6)
	if e.Lease != 0 {
		n++
	}
	b = msgp.AppendMapHeader(b, n)
	b = msgp.AppendString(b, "grant")
	b = msgp.AppendBytes(b, e.Grant[:])
	b = msgp.AppendString(b, "token")
	b = msgp.AppendBytes(b, e.Token[:])
	b = msgp.AppendString(b, "start_token")
	b = appendInt(b, e.StartToken)
	b = msgp.AppendString(b, "num_tokens")
	b = appendInt(b, e.NumTokens)
	b = msgp.AppendString(b, "prompt_digest")
	b = msgp.AppendBytes(b, e.PromptDigest[:])
	b = msgp.AppendString(b, "generation")
	b = msgp.AppendUint64(b, uint64(e.Generation))
	if e.Lease != 0 {
		b = msgp.AppendUint64(msgp.AppendString(b, "lease"), uint64(e.Lease))
	}
	return b
}

// ParsePushReg decodes a whole notification, prefix included.
//
// Stricter than stock, which stores whatever has a str request_id and fails later, when it uses the
// rest: request_id, decode_engine_id, decode_host, decode_port, decode_tp_size and local_block_ids
// must be there and usable; the remote keys may be missing or nil but not mistyped; a port is
// 1…65535, a size 1…MaxRanks, a block id 0…2^32-1; no id is empty. local_block_ids may be flat: one
// group.
func ParsePushReg(b []byte) (*PushReg, error) {
	r := newReader("PUSH_REG", b, MaxNotification)
	if string(r.next(min(len(prefixPushReg), len(b)))) != prefixPushReg {
		r.fail(ErrSyntax, "does not start with %q", prefixPushReg)
	}
	p := new(PushReg)
	var seen keySet
	for range r.mapLen() {
		key := r.key()
		if i := pushRegIndex(key); i >= 0 {
			seen.add(i)
			p.decodeField(r, i)
		} else {
			r.skip()
		}
		if r.err != nil {
			break
		}
	}
	r.require(seen, pushRegKeys[:pushRegRequired]...)
	if err := r.end(); err != nil {
		return nil, err
	}
	if err := p.validate(); err != nil {
		return nil, err
	}
	return p, nil
}

func pushRegIndex(key []byte) int {
	for i, k := range pushRegKeys {
		if string(key) == k {
			return i
		}
	}
	return -1
}

func (p *PushReg) decodeField(r *reader, i int) {
	switch i {
	case 0:
		p.RequestID = kv.RequestID(r.str(MaxIDLen))
	case 1:
		p.DecodeEngineID = kv.EngineID(r.str(MaxIDLen))
	case 2:
		p.DecodeHost = r.str(MaxHostLen)
	case 3:
		p.DecodePort = r.intIn(1, math.MaxUint16)
	case 4:
		p.DecodeTPSize = r.intIn(1, MaxRanks)
	case 5:
		p.LocalBlockIDs = r.blockIDs()
	case 6:
		p.RemoteEngineID = kv.EngineID(r.optStr(MaxIDLen))
	case 7:
		p.RemoteHost = r.optStr(MaxHostLen)
	case 8:
		p.RemotePort = r.optIntIn(1, math.MaxUint16)
	case 9:
		p.RemoteTPSize = r.optIntIn(1, MaxRanks)
	case 10:
		p.RemotePPSize = r.optIntIn(1, MaxRanks)
	case 11:
		p.TransferID = kv.TransferID(r.optStr(MaxIDLen))
	case 12:
		p.Extension = r.pushRegExtension()
	}
}

func (r *reader) pushRegExtension() *PushRegExtension {
	e := new(PushRegExtension)
	var seen keySet
	for range r.mapLen() {
		switch key := r.extensionKey(); string(key) {
		case "grant":
			r.binExactly(e.Grant[:])
			seen.add(0)
		case "start_token":
			e.StartToken = r.intIn(0, MaxTokens)
			seen.add(1)
		case "num_tokens":
			e.NumTokens = r.intIn(0, MaxTokens)
			seen.add(2)
		case "prompt_digest":
			r.binExactly(e.PromptDigest[:])
			seen.add(3)
		case "generation":
			e.Generation = kv.Generation(r.uint())
			seen.add(4)
		case "token":
			r.binExactly(e.Token[:])
			seen.add(5)
		case "lease":
			e.Lease = kv.Generation(r.uint())
		default:
			r.skip()
		}
		if r.err != nil {
			return nil
		}
	}
	r.require(seen, "kvferry.grant", "kvferry.start_token", "kvferry.num_tokens", "kvferry.prompt_digest", "kvferry.generation", "kvferry.token")
	return e
}

// validate checks what the types of the fields leave open, for both directions.
func (p *PushReg) validate() error {
	bad := func(field string, kind error, reason string) error {
		return &DecodeError{Message: "PUSH_REG", Field: field, Offset: -1, Reason: reason, Kind: kind}
	}
	if reason, kind := badRequestID(p.RequestID); reason != "" {
		return bad("request_id", kind, reason)
	}
	for _, t := range []struct {
		field, text string
		limit       int
		optional    bool
	}{
		{"decode_engine_id", string(p.DecodeEngineID), MaxIDLen, false},
		{"decode_host", p.DecodeHost, MaxHostLen, false},
		{"remote_engine_id", string(p.RemoteEngineID), MaxIDLen, true},
		{"remote_host", p.RemoteHost, MaxHostLen, true},
		{"transfer_id", string(p.TransferID), MaxIDLen, true},
	} {
		if reason, kind := badText(t.text, t.limit, t.optional); reason != "" {
			return bad(t.field, kind, reason)
		}
	}
	for _, n := range []struct {
		field      string
		value, top int
		optional   bool
	}{
		{"decode_port", p.DecodePort, math.MaxUint16, false},
		{"decode_tp_size", p.DecodeTPSize, MaxRanks, false},
		{"remote_port", p.RemotePort, math.MaxUint16, true},
		{"remote_tp_size", p.RemoteTPSize, MaxRanks, true},
		{"remote_pp_size", p.RemotePPSize, MaxRanks, true},
	} {
		if n.value < 0 || n.value > n.top || n.value == 0 && !n.optional {
			return bad(n.field, ErrRange, "is outside its range")
		}
	}
	if len(p.LocalBlockIDs) > MaxGroups || p.LocalBlockIDs.Len() > MaxBlocks {
		return bad("local_block_ids", ErrLimit, "has too many groups or blocks")
	}
	if e := p.Extension; e != nil {
		if e.StartToken < 0 || e.StartToken > MaxTokens || e.NumTokens < 0 || e.NumTokens > MaxTokens {
			return bad("kvferry", ErrRange, "start_token or num_tokens is outside its range")
		}
	}
	return nil
}
