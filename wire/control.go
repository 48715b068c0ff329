package wire

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/kvferry/kvferry/kv"
	"github.com/tinylib/msgp/msgp"
)

// ControlCapability is the capability by which a rank announces, in its kvferry extension, that it
// understands control messages. They are sent to no other peer.
const ControlCapability = "control1"

// ClaimCapability is the capability by which a rank announces that it understands Claim, Claimed and
// Failed about a claim. It comes with ControlCapability.
const ClaimCapability = "claim1"

// prefixControl begins every control message. It is no prefix of a request id that this package
// lets through, so that neither can be taken for the other.
const prefixControl = "KVFERRY:"

// Control messages keep two kvferry ranks informed of each other: Beat, Cancel, Claim (D to P),
// States, Claimed, Failed (P to D) and Ack (either way). On the wire each is "KVFERRY:" and a msgpack map whose key
// "kind" says which.
//
// Seq numbers the Beats, Cancels, Claims and Faileds of one sender to one receiver, from 1 upwards. A
// message that is sent again keeps its number. States, Claimed and Ack carry the number that they
// answer.

// Sender is D's engine as P reaches it, to answer.
type Sender struct {
	Engine kv.EngineID
	Host   string // of the side channel
	Port   int
	TP     int
}

// Beat is D's sign of life. It renews P's leases on what it names and asks for the state of each
// registration; P answers every Beat with States.
type Beat struct {
	Seq           uint64
	From          Sender
	Names         []kv.RequestID    // requests that are waited for, in any way in which P may know them
	Registrations []RegistrationRef // what P was asked to write
}

// RegistrationRef names one registration of D.
type RegistrationRef struct {
	ID         kv.RequestID // PushReg.RequestID
	Generation kv.Generation
}

// RequestState is where a registration stands at P.
type RequestState string

const (
	StateUnknown   RequestState = "unknown"   // P has no such registration
	StateUnmatched RequestState = "unmatched" // P has the registration, and no prefill that it is for
	StateQueued    RequestState = "queued"    // the prefill waits for its turn
	StateRunning   RequestState = "running"   // the prefill is computed
	StateFinished  RequestState = "finished"  // the KV is ready, the WRITE not yet begun
	StateWriting   RequestState = "writing"
	StateSent      RequestState = "sent" // the WRITE has ended well; its completion was delivered with it
)

var requestStates = [...]RequestState{StateUnknown, StateUnmatched, StateQueued, StateRunning, StateFinished, StateWriting, StateSent}

// States answers a Beat, or (Seq 0) acknowledges a registration.
type States struct {
	Seq     uint64 // of the Beat
	Answers []StateAnswer
}

// StateAnswer is the state of one registration.
type StateAnswer struct {
	RegistrationRef
	State RequestState
}

// Cancel says that D does not want a request's KV any more. P gives its blocks back; its Ack says
// that nothing of the registration is written any more. A Generation of 0 is of a request that D
// never registered.
type Cancel struct {
	Seq        uint64
	From       Sender
	ID         kv.RequestID // PushReg.RequestID; D's id without a registration
	Generation kv.Generation
	TransferID kv.TransferID // "" when the router gave none
	RemoteID   kv.RequestID  // the id by which the router names P's request; "" when it gave none
	Digest     [32]byte      // of the prompt; zero when not told
	Reason     string
}

// Failed says that P will not serve a registration.
type Failed struct {
	Seq uint64
	RegistrationRef
	Phase  string // of P's work: "prefill", "lease", "registration", "transfer", "handshake"
	Reason string // for people; it ends in the client's error message
}

// Ack says that a Cancel or Failed was taken, once or again.
type Ack struct {
	Seq uint64
}

// Claim asks P, in pull, for the permission to read the blocks of one finished request. P gives it
// (Claimed) if it holds exactly what D believes: the request, its lease, its prompt, its blocks; else
// it answers Failed, which names the claim. Cancel with the claim's reference ends it early.
type Claim struct {
	Seq             uint64
	From            Sender
	RegistrationRef               // P's request id; the claim's own number, D's
	Lease           kv.Generation // of P's hold; 0 when D was not told
	Tokens          int           // whose KV is in the blocks
	Readers         int           // claims, this one included, that D will make of the request
	Digest          [32]byte      // of the tokens and what else the KV depends on
	Blocks          [32]byte      // BlocksDigest of the blocks that D will read from
}

// Claimed is P's permission.
type Claimed struct {
	Seq uint64 // of the Claim
	RegistrationRef
	Grant [16]byte
}

// BlocksDigest is a digest of block lists, so that two engines can compare them.
func BlocksDigest(ids kv.BlockIDs) [32]byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(ids)))
	for _, g := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(g)))
		for _, id := range g {
			b = binary.LittleEndian.AppendUint32(b, uint32(id))
		}
	}
	return sha256.Sum256(b)
}

func (*Beat) notification()    {}
func (*States) notification()  {}
func (*Cancel) notification()  {}
func (*Failed) notification()  {}
func (*Ack) notification()     {}
func (*Claim) notification()   {}
func (*Claimed) notification() {}

// BoundReason cuts a text to what Cancel and Failed carry: at most MaxReason bytes of UTF-8.
func BoundReason(s string) string {
	if len(s) > MaxReason {
		s = s[:MaxReason]
		for len(s) > 0 && !utf8.RuneStart(s[len(s)-1]) {
			s = s[:len(s)-1]
		}
		if n := len(s); n > 0 && s[n-1] >= utf8.RuneSelf {
			s = s[:n-1] // the first byte of a rune that may be cut
		}
	}
	return string(bytes.ToValidUTF8([]byte(s), []byte("?")))
}

// controlKeys are all keys of control messages.
var controlKeys = [...]string{"kind", "seq", "engine", "host", "port", "tp", "names", "registrations", "answers", "id", "generation",
	"transfer_id", "remote_id", "digest", "phase", "reason", "lease", "tokens", "readers", "blocks", "grant"}

const (
	keyKind = iota
	keySeq
	keyEngine
	keyHost
	keyPort
	keyTP
	keyNames
	keyRegistrations
	keyAnswers
	keyID
	keyGeneration
	keyTransferID
	keyRemoteID
	keyDigest
	keyPhase
	keyReason
	keyLease
	keyTokens
	keyReaders
	keyBlocks
	keyGrant
)

// controlKinds says which keys each kind has, in the order in which they are written: the first
// `must` of them in every message, the others where there is something to say.
var controlKinds = [...]struct {
	name string
	keys []int
	must int
}{
	{"beat", []int{keyKind, keySeq, keyEngine, keyHost, keyPort, keyTP, keyNames, keyRegistrations}, 8},
	{"state", []int{keyKind, keySeq, keyAnswers}, 3},
	{"cancel", []int{keyKind, keySeq, keyEngine, keyHost, keyPort, keyTP, keyID, keyGeneration, keyReason, keyTransferID, keyRemoteID, keyDigest}, 9},
	{"failed", []int{keyKind, keySeq, keyID, keyGeneration, keyPhase, keyReason}, 6},
	{"ack", []int{keyKind, keySeq}, 2},
	{"claim", []int{keyKind, keySeq, keyEngine, keyHost, keyPort, keyTP, keyID, keyGeneration, keyLease, keyTokens, keyReaders, keyDigest, keyBlocks}, 13},
	{"claimed", []int{keyKind, keySeq, keyID, keyGeneration, keyGrant}, 5},
}

// controlFields is the union of all kinds.
type controlFields struct {
	kind          string
	seq           uint64
	from          Sender
	names         []kv.RequestID
	registrations []RegistrationRef
	answers       []StateAnswer
	ref           RegistrationRef
	transfer      kv.TransferID
	remote        kv.RequestID
	digest        [32]byte
	phase, reason string
	lease         kv.Generation
	tokens        int
	readers       int
	blocks        [32]byte
	grant         [16]byte
}

// AppendControl appends a control message: a *Beat, *States, *Cancel, *Failed, *Ack, *Claim or
// *Claimed, prefix included. It refuses what ParseControl would.
func AppendControl(dst []byte, n Notification) ([]byte, error) {
	f := fieldsOf(n)
	if f == nil {
		return dst, textError("control message", ErrType, "is of another kind")
	}
	if err := f.validate(); err != nil {
		return dst, err
	}
	out := f.append(append(dst, prefixControl...))
	if len(out)-len(dst) > MaxControl {
		return dst, textError("control message", ErrLimit, "would be larger than "+strconv.Itoa(MaxControl)+" bytes")
	}
	return out, nil
}

func fieldsOf(n Notification) *controlFields {
	switch n := n.(type) {
	case *Beat:
		return &controlFields{kind: "beat", seq: n.Seq, from: n.From, names: n.Names, registrations: n.Registrations}
	case *States:
		return &controlFields{kind: "state", seq: n.Seq, answers: n.Answers}
	case *Cancel:
		return &controlFields{kind: "cancel", seq: n.Seq, from: n.From, ref: RegistrationRef{n.ID, n.Generation},
			transfer: n.TransferID, remote: n.RemoteID, digest: n.Digest, reason: n.Reason}
	case *Failed:
		return &controlFields{kind: "failed", seq: n.Seq, ref: n.RegistrationRef, phase: n.Phase, reason: n.Reason}
	case *Ack:
		return &controlFields{kind: "ack", seq: n.Seq}
	case *Claim:
		return &controlFields{kind: "claim", seq: n.Seq, from: n.From, ref: n.RegistrationRef, lease: n.Lease,
			tokens: n.Tokens, readers: n.Readers, digest: n.Digest, blocks: n.Blocks}
	case *Claimed:
		return &controlFields{kind: "claimed", seq: n.Seq, ref: n.RegistrationRef, grant: n.Grant}
	}
	return nil
}

func (f *controlFields) message() Notification {
	switch f.kind {
	case "beat":
		return &Beat{f.seq, f.from, f.names, f.registrations}
	case "state":
		return &States{f.seq, f.answers}
	case "cancel":
		return &Cancel{f.seq, f.from, f.ref.ID, f.ref.Generation, f.transfer, f.remote, f.digest, f.reason}
	case "failed":
		return &Failed{f.seq, f.ref, f.phase, f.reason}
	case "claim":
		return &Claim{f.seq, f.from, f.ref, f.lease, f.tokens, f.readers, f.digest, f.blocks}
	case "claimed":
		return &Claimed{f.seq, f.ref, f.grant}
	}
	return &Ack{f.seq}
}

func (f *controlFields) append(b []byte) []byte {
	var keys []int
	for _, k := range controlKinds {
		if k.name != f.kind {
			continue
		}
		for i, key := range k.keys {
			if i < k.must || f.has(key) {
				keys = append(keys, key)
			}
		}
	}
	b = msgp.AppendMapHeader(b, uint32(len(keys)))
	for _, key := range keys {
		b = f.appendField(msgp.AppendString(b, controlKeys[key]), key)
	}
	return b
}

// has tells whether an optional key has something to say.
func (f *controlFields) has(key int) bool {
	switch key {
	case keyTransferID:
		return f.transfer != ""
	case keyRemoteID:
		return f.remote != ""
	}
	return f.digest != [32]byte{}
}

func (f *controlFields) appendField(b []byte, key int) []byte {
	switch key {
	case keyKind:
		return msgp.AppendString(b, f.kind)
	case keySeq:
		return msgp.AppendUint64(b, f.seq)
	case keyEngine:
		return msgp.AppendString(b, string(f.from.Engine))
	case keyHost:
		return msgp.AppendString(b, f.from.Host)
	case keyPort:
		return appendInt(b, f.from.Port)
	case keyTP:
		return appendInt(b, f.from.TP)
	case keyNames:
		b = msgp.AppendArrayHeader(b, uint32(len(f.names)))
		for _, id := range f.names {
			b = msgp.AppendString(b, string(id))
		}
		return b
	case keyRegistrations:
		b = msgp.AppendArrayHeader(b, uint32(len(f.registrations)))
		for _, r := range f.registrations {
			b = r.append(msgp.AppendArrayHeader(b, 2))
		}
		return b
	case keyAnswers:
		b = msgp.AppendArrayHeader(b, uint32(len(f.answers)))
		for _, a := range f.answers {
			b = msgp.AppendString(a.append(msgp.AppendArrayHeader(b, 3)), string(a.State))
		}
		return b
	case keyID:
		return msgp.AppendString(b, string(f.ref.ID))
	case keyGeneration:
		return msgp.AppendUint64(b, uint64(f.ref.Generation))
	case keyTransferID:
		return msgp.AppendString(b, string(f.transfer))
	case keyRemoteID:
		return msgp.AppendString(b, string(f.remote))
	case keyDigest:
		return msgp.AppendBytes(b, f.digest[:])
	case keyPhase:
		return msgp.AppendString(b, f.phase)
	case keyLease:
		return msgp.AppendUint64(b, uint64(f.lease))
	case keyTokens:
		return appendInt(b, f.tokens)
	case keyReaders:
		return appendInt(b, f.readers)
	case keyBlocks:
		return msgp.AppendBytes(b, f.blocks[:])
	case keyGrant:
		return msgp.AppendBytes(b, f.grant[:])
	}
	return msgp.AppendString(b, f.reason)
}

func (r RegistrationRef) append(b []byte) []byte {
	return msgp.AppendUint64(msgp.AppendString(b, string(r.ID)), uint64(r.Generation))
}

// ParseControl decodes a control message, prefix included. The keys of its kind must be there, a
// key of another kind or a second copy of one is refused, unknown keys are skipped.
func ParseControl(b []byte) (Notification, error) {
	r := newReader("control message", b, MaxControl)
	if string(r.next(min(len(prefixControl), len(b)))) != prefixControl {
		r.fail(ErrSyntax, "does not start with %q", prefixControl)
	}
	f := new(controlFields)
	var seen keySet
	for range r.mapLen() {
		key := r.key()
		i := controlKey(key)
		switch {
		case r.err != nil:
		case i < 0:
			r.skip()
		case seen&(1<<i) != 0:
			r.fail(ErrSyntax, "comes twice")
		default:
			seen.add(i)
			f.decodeField(r, i)
		}
		if r.err != nil {
			break
		}
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	if err := f.checkKeys(seen); err != nil {
		return nil, err
	}
	if err := f.validate(); err != nil {
		return nil, err
	}
	return f.message(), nil
}

func controlKey(key []byte) int {
	for i, k := range controlKeys {
		if string(key) == k {
			return i
		}
	}
	return -1
}

func controlError(field string, kind error, reason string) error {
	return &DecodeError{Message: "control message", Field: field, Offset: -1, Reason: reason, Kind: kind}
}

// checkKeys compares the keys that came with those of the kind.
func (f *controlFields) checkKeys(seen keySet) error {
	if seen&(1<<keyKind) == 0 {
		return controlError("kind", ErrMissing, "is missing")
	}
	for _, k := range controlKinds {
		if k.name != f.kind {
			continue
		}
		for i, key := range k.keys {
			if i < k.must && seen&(1<<key) == 0 {
				return controlError(controlKeys[key], ErrMissing, "is missing")
			}
			seen &^= 1 << key
		}
		for key, name := range controlKeys {
			if seen&(1<<key) != 0 {
				return controlError(name, ErrRange, "has no place in a "+f.kind)
			}
		}
		return nil
	}
	return controlError("kind", ErrRange, strconv.Quote(shorten(f.kind))+" is unknown")
}

func (f *controlFields) decodeField(r *reader, key int) {
	switch key {
	case keyKind:
		f.kind = r.str(MaxName)
	case keySeq:
		f.seq = r.uint()
	case keyEngine:
		f.from.Engine = kv.EngineID(r.str(MaxIDLen))
	case keyHost:
		f.from.Host = r.str(MaxHostLen)
	case keyPort:
		f.from.Port = r.intIn(1, math.MaxUint16)
	case keyTP:
		f.from.TP = r.intIn(1, MaxRanks)
	case keyNames:
		f.names = entries(r, func() kv.RequestID { return kv.RequestID(r.str(MaxIDLen)) })
	case keyRegistrations:
		f.registrations = entries(r, func() RegistrationRef { r.exactly(2); return r.registrationRef() })
	case keyAnswers:
		f.answers = entries(r, func() StateAnswer {
			r.exactly(3)
			return StateAnswer{r.registrationRef(), RequestState(r.str(MaxName))}
		})
	case keyID:
		f.ref.ID = kv.RequestID(r.str(MaxIDLen))
	case keyGeneration:
		f.ref.Generation = kv.Generation(r.uint())
	case keyTransferID:
		f.transfer = kv.TransferID(r.str(MaxIDLen))
	case keyRemoteID:
		f.remote = kv.RequestID(r.str(MaxIDLen))
	case keyDigest:
		r.binExactly(f.digest[:])
	case keyPhase:
		f.phase = r.str(MaxName)
	case keyReason:
		f.reason = r.str(MaxReason)
	case keyLease:
		f.lease = kv.Generation(r.uint())
	case keyTokens:
		f.tokens = r.intIn(1, MaxTokens)
	case keyReaders:
		f.readers = r.intIn(1, MaxReaders)
	case keyBlocks:
		r.binExactly(f.blocks[:])
	case keyGrant:
		r.binExactly(f.grant[:])
	}
}

// entries reads an array of at most MaxControlEntries; nil when empty.
func entries[T any](r *reader, one func() T) []T {
	n := r.arrayLen(MaxControlEntries)
	if n == 0 || r.err != nil {
		return nil
	}
	out := make([]T, 0, n)
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		out = append(out, one())
	}
	r.elem = -1
	return out
}

// exactly reads the header of an array of n items.
func (r *reader) exactly(n int) {
	if got := r.arrayLen(n); r.err == nil && got != n {
		r.fail(ErrRange, "has %d items instead of %d", got, n)
	}
}

func (r *reader) registrationRef() RegistrationRef {
	return RegistrationRef{kv.RequestID(r.str(MaxIDLen)), kv.Generation(r.uint())}
}

// validate checks what the types leave open, for both directions.
func (f *controlFields) validate() error {
	if f.kind == "beat" || f.kind == "cancel" || f.kind == "claim" {
		if reason, kind := badText(string(f.from.Engine), MaxIDLen, false); reason != "" {
			return controlError("engine", kind, reason)
		}
		if reason, kind := badText(f.from.Host, MaxHostLen, false); reason != "" {
			return controlError("host", kind, reason)
		}
		if f.from.Port < 1 || f.from.Port > math.MaxUint16 {
			return controlError("port", ErrRange, strconv.Itoa(f.from.Port)+" is outside its range")
		}
		if f.from.TP < 1 || f.from.TP > MaxRanks {
			return controlError("tp", ErrRange, strconv.Itoa(f.from.TP)+" is outside its range")
		}
	}
	if f.kind == "claim" && (f.tokens < 1 || f.tokens > MaxTokens) {
		return controlError("tokens", ErrRange, strconv.Itoa(f.tokens)+" is outside its range")
	}
	if f.kind == "claim" && (f.readers < 1 || f.readers > MaxReaders) {
		return controlError("readers", ErrRange, strconv.Itoa(f.readers)+" is outside its range")
	}
	if f.seq == 0 && f.kind != "state" {
		return controlError("seq", ErrRange, "is 0")
	}
	if len(f.names) > MaxControlEntries || len(f.registrations) > MaxControlEntries || len(f.answers) > MaxControlEntries {
		return controlError("", ErrLimit, "has more than "+strconv.Itoa(MaxControlEntries)+" entries")
	}
	for _, id := range f.names {
		if reason, kind := badRequestID(id); reason != "" {
			return controlError("names", kind, reason)
		}
	}
	for _, ref := range f.registrations {
		if reason, kind := ref.bad(); reason != "" {
			return controlError("registrations", kind, reason)
		}
	}
	for _, a := range f.answers {
		if reason, kind := a.bad(); reason != "" {
			return controlError("answers", kind, reason)
		}
		if !a.State.valid() {
			return controlError("answers", ErrRange, "state "+strconv.Quote(shorten(string(a.State)))+" is unknown")
		}
	}
	return f.validateOne()
}

// validateOne checks the keys of messages about one request.
func (f *controlFields) validateOne() error {
	switch f.kind {
	case "cancel", "failed", "claim", "claimed":
		if reason, kind := badRequestID(f.ref.ID); reason != "" {
			return controlError("id", kind, reason)
		}
		if f.ref.Generation == 0 && f.kind != "cancel" {
			return controlError("generation", ErrRange, "is 0")
		}
	}
	if f.remote != "" {
		if reason, kind := badRequestID(f.remote); reason != "" {
			return controlError("remote_id", kind, reason)
		}
	}
	for _, t := range []struct {
		field, text string
		limit       int
	}{{"transfer_id", string(f.transfer), MaxIDLen}, {"phase", f.phase, MaxName}, {"reason", f.reason, MaxReason}} {
		if reason, kind := badText(t.text, t.limit, true); reason != "" {
			return controlError(t.field, kind, reason)
		}
	}
	return nil
}

func (r RegistrationRef) bad() (string, error) {
	if r.Generation == 0 {
		return "generation is 0", ErrRange
	}
	return badRequestID(r.ID)
}

func (s RequestState) valid() bool {
	for _, x := range requestStates {
		if s == x {
			return true
		}
	}
	return false
}
