package wire

import (
	"math"
	"strconv"

	"github.com/kvferry/kvferry/kv"
)

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
		f.registrations = entries(r, func() RegistrationRef { r.exactly(3); return r.registrationRef() })
	case keyAnswers:
		f.answers = entries(r, func() StateAnswer {
			r.exactly(4)
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
	case keyToken:
		r.binExactly(f.ref.Token[:])
	case keySteps:
		f.steps = r.uint()
	case keyReceipt:
		r.binExactly(f.receipt[:])
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
	ref := RegistrationRef{ID: kv.RequestID(r.str(MaxIDLen)), Generation: kv.Generation(r.uint())}
	r.binExactly(ref.Token[:])
	return ref
}
