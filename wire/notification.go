package wire

import (
	"bytes"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kvferry/kvferry/kv"
)

const (
	prefixPushReg   = "PUSH_REG:"
	prefixHeartbeat = "HB:"
	prefixPushFail  = "PUSH_FAIL:"
)

// Notification is one of *PushReg, Heartbeat, PushFail, Completion, and the control messages *Beat,
// *States, *Cancel, *Failed, *Ack, *Claim, *Claimed.
type Notification interface{ notification() }

// Heartbeat renews P's leases on these requests; they are P's ids. Unknown ones mean nothing.
type Heartbeat struct {
	IDs []kv.RequestID
}

// PushFail tells D that P could not post the WRITE of a request. It is no part of release 0.32.0
// and is sent only to peers that announce it.
type PushFail struct {
	ID kv.RequestID // D's
	TP int          // P's TP size
}

// Completion says that the data it came with has arrived. In push it goes from P to D with D's
// request id and P's TP size; in pull from D to P with P's request id and the number of such
// notifications that this P rank is to wait for (nixl-connector.md, section 5.2).
type Completion struct {
	ID kv.RequestID
	N  int
}

func (*PushReg) notification()   {}
func (Heartbeat) notification()  {}
func (PushFail) notification()   {}
func (Completion) notification() {}

// ParseNotification decodes a notification in the stock order: registration, heartbeat, failure,
// completion (nixl-connector.md, section 5). Control messages, which stock peers never send, have a
// prefix of their own.
//
// Stricter than stock: a count is plain decimal 1…MaxRanks without sign, space, underscore or
// leading zero (0 and negative counts can never complete), request ids are not empty and start with
// no prefix of another notification, and what ParsePushReg says.
func ParseNotification(b []byte) (Notification, error) {
	switch {
	case bytes.HasPrefix(b, []byte(prefixPushReg)):
		reg, err := ParsePushReg(b)
		if err != nil {
			return nil, err
		}
		return reg, nil
	case bytes.HasPrefix(b, []byte(prefixHeartbeat)):
		return parseHeartbeat(b)
	case bytes.HasPrefix(b, []byte(prefixPushFail)):
		id, n, err := parseCounted("PUSH_FAIL", b, len(prefixPushFail))
		if err != nil {
			return nil, err
		}
		return PushFail{ID: id, TP: n}, nil
	case bytes.HasPrefix(b, []byte(prefixControl)):
		return ParseControl(b)
	}
	id, n, err := parseCounted("completion", b, 0)
	if err != nil {
		return nil, err
	}
	return Completion{ID: id, N: n}, nil
}

// AppendHeartbeat appends a heartbeat for at least one of P's request ids. It refuses ids that the
// comma-joined form cannot carry and more than MaxHeartbeatIDs.
func AppendHeartbeat(dst []byte, ids []kv.RequestID) ([]byte, error) {
	const msg = "heartbeat"
	if len(ids) == 0 || len(ids) > MaxHeartbeatIDs {
		return dst, textError(msg, ErrLimit, "has "+strconv.Itoa(len(ids))+" request ids")
	}
	out := append(dst, prefixHeartbeat...)
	for i, id := range ids {
		if reason, kind := badRequestID(id); reason != "" {
			return dst, textError(msg, kind, reason)
		}
		if strings.Contains(string(id), ",") {
			return dst, textError(msg, ErrRange, "request id "+strconv.Quote(string(id))+" contains a comma")
		}
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, id...)
	}
	if len(out)-len(dst) > MaxNotification {
		return dst, textError(msg, ErrLimit, "would be larger than a notification may be")
	}
	return out, nil
}

// AppendCompletion appends a completion.
func AppendCompletion(dst []byte, c Completion) ([]byte, error) {
	return appendCounted(dst, "completion", "", c.ID, c.N)
}

// AppendPushFail appends a failure notice.
func AppendPushFail(dst []byte, f PushFail) ([]byte, error) {
	return appendCounted(dst, "PUSH_FAIL", prefixPushFail, f.ID, f.TP)
}

func appendCounted(dst []byte, msg, prefix string, id kv.RequestID, n int) ([]byte, error) {
	if reason, kind := badRequestID(id); reason != "" {
		return dst, textError(msg, kind, reason)
	}
	if n < 1 || n > MaxRanks {
		return dst, textError(msg, ErrRange, "count "+strconv.Itoa(n)+" is outside 1…"+strconv.Itoa(MaxRanks))
	}
	dst = append(dst, prefix...)
	dst = append(dst, id...)
	dst = append(dst, ':')
	return strconv.AppendInt(dst, int64(n), 10), nil
}

func parseHeartbeat(b []byte) (Notification, error) {
	const msg = "heartbeat"
	if err := checkText(msg, b, MaxNotification); err != nil {
		return nil, err
	}
	text := string(b[len(prefixHeartbeat):])
	if n := strings.Count(text, ",") + 1; n > MaxHeartbeatIDs {
		return nil, textError(msg, ErrLimit, "has "+strconv.Itoa(n)+" request ids, more than "+strconv.Itoa(MaxHeartbeatIDs))
	}
	var hb Heartbeat
	for id := range strings.SplitSeq(text, ",") {
		switch {
		case id == "": // stock looks it up like any other and finds nothing
		case len(id) > MaxIDLen:
			return nil, textError(msg, ErrLimit, "has a request id of "+strconv.Itoa(len(id))+" bytes")
		default:
			hb.IDs = append(hb.IDs, kv.RequestID(id))
		}
	}
	return hb, nil
}

// parseCounted splits `<id>:<n>` behind the prefix at the last colon: ids may contain colons.
func parseCounted(msg string, b []byte, prefix int) (kv.RequestID, int, error) {
	if err := checkText(msg, b, MaxIDLen+64); err != nil {
		return "", 0, err
	}
	text := string(b[prefix:])
	colon := strings.LastIndexByte(text, ':')
	if colon < 0 {
		return "", 0, textError(msg, ErrSyntax, "has no colon")
	}
	id := kv.RequestID(text[:colon])
	if reason, kind := badRequestID(id); reason != "" {
		return "", 0, textError(msg, kind, reason)
	}
	digits := text[colon+1:]
	n, err := strconv.Atoi(digits)
	if err != nil || strconv.Itoa(n) != digits {
		return "", 0, textError(msg, ErrSyntax, "count "+strconv.Quote(shorten(digits))+" is not a number")
	}
	if n < 1 || n > MaxRanks {
		return "", 0, textError(msg, ErrRange, "count "+digits+" is outside 1…"+strconv.Itoa(MaxRanks))
	}
	return id, n, nil
}

// badRequestID says why an id cannot be carried by notifications; "" if it can.
func badRequestID(id kv.RequestID) (reason string, kind error) {
	s := string(id)
	switch {
	case s == "":
		return "request id is empty", ErrRange
	case len(s) > MaxIDLen:
		return "request id has " + strconv.Itoa(len(s)) + " bytes, more than " + strconv.Itoa(MaxIDLen), ErrLimit
	case !utf8.ValidString(s):
		return "request id is not UTF-8", ErrSyntax
	case strings.HasPrefix(s, prefixHeartbeat), strings.HasPrefix(s, prefixPushReg), strings.HasPrefix(s, prefixPushFail),
		strings.HasPrefix(s, prefixControl):
		return "request id " + strconv.Quote(shorten(s)) + " starts like another notification", ErrRange
	}
	return "", nil
}

func checkText(msg string, b []byte, limit int) error {
	if len(b) > limit {
		return textError(msg, ErrLimit, "has "+strconv.Itoa(len(b))+" bytes, more than "+strconv.Itoa(limit))
	}
	if !utf8.Valid(b) {
		return textError(msg, ErrSyntax, "is not UTF-8")
	}
	return nil
}

func textError(msg string, kind error, reason string) error {
	return &DecodeError{Message: msg, Offset: -1, Reason: reason, Kind: kind}
}

func shorten(s string) string { return fieldName([]byte(s)) }
