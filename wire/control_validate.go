package wire

import (
	"math"
	"strconv"
)

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
	if f.seq == 0 && f.kind != "state" && f.kind != "read" {
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
	case "cancel", "failed", "claim", "claimed", "read":
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
