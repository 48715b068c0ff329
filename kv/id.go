package kv

// EngineID names one model instance. Two engines never share one at the same time; an engine that
// restarts may come back under the same id and is then another Generation.
type EngineID string

// RequestID is an engine's internal id of one request, unique in that engine while the request
// lives. It may contain colons but not commas (heartbeats join ids with commas).
type RequestID string

// BaseRequestID is a RequestID without the random suffix that each engine appends. The two engines
// that serve one client request agree on it, not on the RequestID.
type BaseRequestID string

// TransferID is the router's id of one dispatch: the same on both legs, new for every attempt. The
// empty TransferID means that the router gave none.
type TransferID string

// Generation changes whenever something with the same name is added again, so that what belongs
// to an earlier holder of the name is recognised and dropped. The zero Generation is never in use.
type Generation uint64

// Token is an index into a model's vocabulary.
type Token int32

const randomSuffixLen = 8

// Base removes the random suffix: one trailing '-' followed by 8 hexadecimal digits of either
// case, once. Any other id is its own base (nixl-connector.md, section 7.4). A newline behind the
// suffix is kept, as the stock rule keeps it.
func (id RequestID) Base() BaseRequestID {
	s, tail := string(id), ""
	if n := len(s); n > 0 && s[n-1] == '\n' {
		s, tail = s[:n-1], "\n"
	}
	cut := len(s) - randomSuffixLen - 1
	if cut < 0 || s[cut] != '-' {
		return BaseRequestID(id)
	}
	for i := cut + 1; i < len(s); i++ {
		if !isHex(s[i]) {
			return BaseRequestID(id)
		}
	}
	return BaseRequestID(s[:cut] + tail)
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

// Rank is the position of one shard of an engine.
type Rank struct {
	PP int // pipeline stage, from 0
	TP int // tensor-parallel rank, from 0
}
