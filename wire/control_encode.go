package wire

import (
	"github.com/kvferry/kvferry/kv"
	"github.com/tinylib/msgp/msgp"
	"strconv"
)

// controlKeys are all keys of control messages.
var controlKeys = [...]string{"kind", "seq", "engine", "host", "port", "tp", "names", "registrations", "answers", "id", "generation",
	"transfer_id", "remote_id", "digest", "phase", "reason", "lease", "tokens", "readers", "blocks", "grant", "token", "receipt", "steps"}

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
	keyToken
	keyReceipt
	keySteps
)

// controlKinds says which keys each kind has, in the order in which they are written: the first
// `must` of them in every message, the others where there is something to say.
var controlKinds = [...]struct {
	name string
	keys []int
	must int
}{
	{"beat", []int{keyKind, keySeq, keyEngine, keyHost, keyPort, keyTP, keyNames, keyRegistrations}, 8},
	{"state", []int{keyKind, keySeq, keySteps, keyAnswers}, 4},
	{"cancel", []int{keyKind, keySeq, keyEngine, keyHost, keyPort, keyTP, keyID, keyGeneration, keyToken, keyReceipt, keyReason, keyTransferID, keyRemoteID, keyDigest}, 11},
	{"failed", []int{keyKind, keySeq, keyID, keyGeneration, keyToken, keyReceipt, keyPhase, keyReason}, 8},
	{"ack", []int{keyKind, keySeq, keyReceipt}, 3},
	{"claim", []int{keyKind, keySeq, keyEngine, keyHost, keyPort, keyTP, keyID, keyGeneration, keyToken, keyLease, keyTokens, keyReaders, keyDigest, keyBlocks}, 14},
	{"claimed", []int{keyKind, keySeq, keyID, keyGeneration, keyToken, keyGrant}, 6},
	{"read", []int{keyKind, keyID, keyGeneration, keyToken}, 4},
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
	receipt       Token
	steps         uint64
}

// AppendControl appends a control message: a *Beat, *States, *Cancel, *Failed, *Ack, *Claim,
// *Claimed or *ReadDone, prefix included. It refuses what ParseControl would.
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
		return &controlFields{kind: "state", seq: n.Seq, steps: n.Steps, answers: n.Answers}
	case *Cancel:
		return &controlFields{kind: "cancel", seq: n.Seq, receipt: n.Receipt, from: n.From, ref: n.RegistrationRef,
			transfer: n.TransferID, remote: n.RemoteID, digest: n.Digest, reason: n.Reason}
	case *Failed:
		return &controlFields{kind: "failed", seq: n.Seq, receipt: n.Receipt, ref: n.RegistrationRef, phase: n.Phase, reason: n.Reason}
	case *Ack:
		return &controlFields{kind: "ack", seq: n.Seq, receipt: n.Receipt}
	case *Claim:
		return &controlFields{kind: "claim", seq: n.Seq, from: n.From, ref: n.RegistrationRef, lease: n.Lease,
			tokens: n.Tokens, readers: n.Readers, digest: n.Digest, blocks: n.Blocks}
	case *Claimed:
		return &controlFields{kind: "claimed", seq: n.Seq, ref: n.RegistrationRef, grant: n.Grant}
	case *ReadDone:
		return &controlFields{kind: "read", ref: n.RegistrationRef}
	}
	return nil
}

func (f *controlFields) message() Notification {
	switch f.kind {
	case "beat":
		return &Beat{f.seq, f.from, f.names, f.registrations}
	case "state":
		return &States{f.seq, f.steps, f.answers}
	case "cancel":
		return &Cancel{f.seq, f.receipt, f.from, f.ref, f.transfer, f.remote, f.digest, f.reason}
	case "failed":
		return &Failed{f.seq, f.receipt, f.ref, f.phase, f.reason}
	case "claim":
		return &Claim{f.seq, f.from, f.ref, f.lease, f.tokens, f.readers, f.digest, f.blocks}
	case "claimed":
		return &Claimed{f.seq, f.ref, f.grant}
	case "read":
		return &ReadDone{f.ref}
	}
	return &Ack{f.seq, f.receipt}
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
			b = r.append(msgp.AppendArrayHeader(b, 3))
		}
		return b
	case keyAnswers:
		b = msgp.AppendArrayHeader(b, uint32(len(f.answers)))
		for _, a := range f.answers {
			b = msgp.AppendString(a.append(msgp.AppendArrayHeader(b, 4)), string(a.State))
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
	case keyToken:
		return msgp.AppendBytes(b, f.ref.Token[:])
	case keySteps:
		return msgp.AppendUint64(b, f.steps)
	case keyReceipt:
		return msgp.AppendBytes(b, f.receipt[:])
	}
	return msgp.AppendString(b, f.reason)
}

func (r RegistrationRef) append(b []byte) []byte {
	return msgp.AppendBytes(msgp.AppendUint64(msgp.AppendString(b, string(r.ID)), uint64(r.Generation)), r.Token[:])
}
