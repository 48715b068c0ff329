package wire

import (
	"errors"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// Control messages of the P2P tier (p2p-tier.md, section 3.1, form W2). Each is one msgpack map with
// the key "type", sent as one frame:
//
//	client                                   server
//	   │ ── connect ──────────────────────────> │   both sides, once
//	   │ <───────────────────────── connect_ack │   both sides: "you may send"
//	   │ ── lookup ───────────────────────────> │
//	   │ <───────────────────────── lookup_resp │
//	   │ ── fetch ────────────────────────────> │   then WRITEs into the client's memory
//	   │ <─────────────────────── transfer_done │
//	   │ ── abort_fetch ──────────────────────> │
//	   │ <─────────────────────────── abort_ack │
//	   │ ── disconnect ───────────────────────> │   either side

// OffloadKey names the content of one block in the CPU tier: the block's hash and, in its last four
// bytes, the big-endian number of its KV-cache group. As a Go string it holds raw bytes.
type OffloadKey string

// P2PMessage is one of *P2PConnect, P2PConnectAck, P2PDisconnect, *P2PLookup, *P2PLookupResp,
// *P2PFetch, P2PTransferDone, P2PAbortFetch, P2PAbortAck, and between kvferry nodes *P2POffer.
type P2PMessage interface {
	// Type is the value of the key "type".
	Type() string
	append(b []byte) []byte
}

// What to do with a message that DecodeP2P refuses; use with errors.Is. An error that is neither
// breaks the protocol: the session ends.
var (
	// ErrP2PIgnored: no message at all (not msgpack, not a map) or one of a type that this version
	// does not know. It is dropped and the session lives on.
	ErrP2PIgnored = errors.New("not a known message")
	// ErrP2PBadKey: an offload key that is not a bin. It is dropped; a sender that goes on like this is
	// disconnected.
	ErrP2PBadKey = errors.New("unusable offload key")
)

const p2pTypeKey = "type"

// AppendP2P appends a message. The order of keys is the stock encoder's.
func AppendP2P(dst []byte, m P2PMessage) []byte { return m.append(dst) }

// DecodeP2P decodes one message, whatever the order of its keys.
//
// Stricter than stock: a bool is no int, a key is a bin (stock takes a list of ints as bytes, and an
// int n as n zero bytes), a fingerprint is a str or nil, an "kvferry" entry must be well formed, and
// the limits of this package.
func DecodeP2P(b []byte) (P2PMessage, error) {
	typ, err := p2pType(b)
	if err != nil {
		return nil, err
	}
	switch typ {
	case "connect":
		return decodeP2PConnect(b)
	case "connect_ack":
		return decodeP2PConnectAck(b)
	case "disconnect":
		return P2PDisconnect{}, nil
	case "lookup":
		return decodeP2PLookup(b)
	case "lookup_resp":
		return decodeP2PLookupResp(b)
	case "fetch":
		return decodeP2PFetch(b)
	case "transfer_done":
		return decodeP2PTransferDone(b)
	case "abort_fetch":
		id, round, err := decodeP2PRound("abort_fetch", b)
		return orNil(P2PAbortFetch{ID: id, Round: round}, err)
	case "abort_ack":
		id, round, err := decodeP2PRound("abort_ack", b)
		return orNil(P2PAbortAck{ID: id, Round: round}, err)
	case "offer":
		return decodeP2POffer(b)
	}
	return nil, p2pIgnored("has the unknown type " + fieldName([]byte(typ)))
}

// p2pType reads the whole message for its type, so that what follows is known to be well formed.
func p2pType(b []byte) (string, error) {
	r := newReader("control message", b, MaxP2PMessage)
	if r.err != nil {
		return "", r.err
	}
	typ := ""
	for range r.mapLen() {
		if k := r.key(); string(k) == p2pTypeKey {
			typ = r.str(MaxText)
		} else {
			r.skip()
		}
		if r.err != nil {
			break
		}
	}
	if err := r.end(); err != nil {
		return "", p2pIgnored(err.Error())
	}
	if typ == "" {
		return "", p2pIgnored("has no type")
	}
	return typ, nil
}

func p2pIgnored(reason string) error {
	return &DecodeError{Message: "control message", Offset: -1, Reason: reason, Kind: ErrP2PIgnored}
}

// p2pHead begins a message of n entries beside its type.
func p2pHead(b []byte, typ string, n int) []byte {
	b = msgp.AppendMapHeader(b, uint32(n+1))
	b = msgp.AppendString(b, p2pTypeKey)
	return msgp.AppendString(b, typ)
}

func p2pAppendID(b []byte, id string) []byte {
	b = msgp.AppendString(b, "kv_request_id")
	return msgp.AppendString(b, id)
}

func p2pAppendRound(b []byte, round uint64) []byte {
	b = msgp.AppendString(b, "round_seq")
	return msgp.AppendUint64(b, round)
}

func p2pAppendKeys(b []byte, keys []OffloadKey) []byte {
	b = msgp.AppendString(b, "keys")
	b = msgp.AppendArrayHeader(b, uint32(len(keys)))
	size := len(keys) // and room for what follows them, a few bytes for each
	for _, k := range keys {
		size += 8 + len(k)
	}
	b = slices.Grow(b, size)
	for _, k := range keys {
		b = msgp.AppendBytesHeader(b, uint32(len(k)))
		b = append(b, k...)
	}
	return b
}

// offloadKeys reads an array of bins; never nil without an error.
func (r *reader) offloadKeys() []OffloadKey {
	n := r.arrayLen(MaxP2PKeys)
	keys := make([]OffloadKey, 0, n)
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		if c, ok := r.peek(); ok && typeName(c) != "bin" {
			r.fail(ErrP2PBadKey, "expected bin, got %s", typeName(c))
			break
		}
		keys = append(keys, OffloadKey(r.bin(MaxP2PKeyLen)))
	}
	return keys
}

// boolean reads a bool.
func (r *reader) boolean() bool {
	c, ok := r.peek()
	if !ok {
		return false
	}
	if c != mTrue && c != mFalse {
		r.wrongType("bool", c)
		return false
	}
	r.next(1)
	return c == mTrue
}

// p2pFields calls read for every key of a message; read reports which of the mandatory keys it was,
// -1 for another that it has read, and p2pUnknown for one that is to be skipped.
func p2pFields(msg string, b []byte, mandatory []string, read func(r *reader, key string) int) error {
	r := newReader(msg, b, MaxP2PMessage)
	var seen keySet
	for range r.mapLen() {
		switch i := read(r, string(r.key())); {
		case i == p2pUnknown:
			r.skip()
		case i >= 0:
			seen.add(i)
		}
		if r.err != nil {
			break
		}
	}
	r.require(seen, mandatory...)
	return r.end()
}

const p2pUnknown = -2

// orNil drops a message that came with an error.
func orNil[M P2PMessage](m M, err error) (P2PMessage, error) {
	if err != nil {
		return nil, err
	}
	return m, nil
}
