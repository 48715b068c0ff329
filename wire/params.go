package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/kvferry/kvferry/kv"
)

// ParseTransferParams decodes the object kv_transfer_params of a request body or a response
// (nixl-connector.md, section 8.1). A null or absent key takes its default, unknown keys and
// vLLM's internal ones are ignored, of duplicate keys the last counts; so does a null object, which
// gives the defaults. remote_block_ids may be flat: one group. Every error is a *ParamError.
//
// Which keys a leg needs is for CheckLeg. Stricter than stock, which checks nothing here and fails
// when it uses a value: an int is no bool, no float and fits its range, ids are not negative, a
// port is 1…65535, a size 1…MaxRanks, a text is UTF-8, transfer_mode is "pull" or "push".
//
// kv_load_failure_policy, "fail" or "recompute", is kvferry's own key: stock engines have that choice
// per engine only (nixl-connector.md, section 6.2) and ignore it. So are kvferry_lease, the generation of
// P's lease, and kvferry_release, by which a router may let that lease's hold go (POST /kv/release): an
// engine that does not give it has no such way, and is not asked.
func ParseTransferParams(raw []byte) (kv.TransferParams, error) {
	p := kv.TransferParams{DCPSize: 1, PPSize: 1}
	raw = bytes.TrimSpace(raw)
	if err := checkParamsText(raw); err != nil {
		return kv.TransferParams{}, err
	}
	if string(raw) == "null" {
		return p, nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil || raw[0] != '{' {
		return kv.TransferParams{}, &ParamError{paramsKey, "is not a JSON object"}
	}
	for _, f := range paramFields {
		v, ok := fields[f.name]
		if !ok || string(v) == "null" {
			continue
		}
		if reason := f.set(&p, v); reason != "" {
			return kv.TransferParams{}, &ParamError{f.name, reason}
		}
	}
	return p, nil
}

// paramFields says how each key is read, in the order in which faults are reported. A set function
// answers what is wrong with the value, or "".
var paramFields = []struct {
	name string
	set  func(p *kv.TransferParams, v []byte) string
}{
	{"do_remote_prefill", func(p *kv.TransferParams, v []byte) string { return setBool(&p.DoRemotePrefill, v) }},
	{"do_remote_decode", func(p *kv.TransferParams, v []byte) string { return setBool(&p.DoRemoteDecode, v) }},
	{"remote_block_ids", func(p *kv.TransferParams, v []byte) string { return setBlockIDs(&p.RemoteBlockIDs, v) }},
	{"remote_engine_id", func(p *kv.TransferParams, v []byte) string { return setText(&p.RemoteEngineID, v, MaxIDLen) }},
	{"remote_request_id", func(p *kv.TransferParams, v []byte) string { return setRequestID(&p.RemoteRequestID, v) }},
	{"remote_host", func(p *kv.TransferParams, v []byte) string { return setText(&p.RemoteHost, v, MaxHostLen) }},
	{"remote_port", func(p *kv.TransferParams, v []byte) string { return setInt(&p.RemotePort, v, 1, math.MaxUint16) }},
	{"tp_size", func(p *kv.TransferParams, v []byte) string { return setInt(&p.TPSize, v, 1, MaxRanks) }},
	{"dcp_size", func(p *kv.TransferParams, v []byte) string { return setInt(&p.DCPSize, v, 1, MaxRanks) }},
	{"pp_size", func(p *kv.TransferParams, v []byte) string { return setInt(&p.PPSize, v, 1, MaxRanks) }},
	{"remote_num_tokens", func(p *kv.TransferParams, v []byte) string { return setInt(&p.RemoteNumTokens, v, 0, MaxTokens) }},
	{"remote_blocks_expiry_time", func(p *kv.TransferParams, v []byte) string { return setFloat(&p.RemoteBlocksExpiry, v) }},
	{"transfer_mode", func(p *kv.TransferParams, v []byte) string { return setMode(&p.Mode, v) }},
	{"remote_prefill_cached_tokens", func(p *kv.TransferParams, v []byte) string {
		p.CachedTokens = new(int)
		return setInt(p.CachedTokens, v, 0, MaxTokens)
	}},
	{"prompt_token_ids", func(p *kv.TransferParams, v []byte) string { return setTokens(&p.PromptTokens, v) }},
	{"transfer_id", func(p *kv.TransferParams, v []byte) string { return setOptText(&p.TransferID, v, MaxIDLen) }},
	{"kvferry_lease", func(p *kv.TransferParams, v []byte) string {
		n, reason := parseInt(v, 0, maxLease)
		p.Lease = kv.Generation(n)
		return reason
	}},
	{"kvferry_release", func(p *kv.TransferParams, v []byte) string { return setOptText(&p.Release, v, MaxReleaseToken) }},
	{"kv_load_failure_policy", func(p *kv.TransferParams, v []byte) string { return setPolicy(&p.LoadFailurePolicy, v) }},
}

// maxLease bounds kvferry_lease: what every JSON library on the way carries exactly.
const maxLease = 1<<53 - 1

// checkParamsText bounds size and nesting before anything is parsed.
func checkParamsText(raw []byte) error {
	if len(raw) == 0 {
		return &ParamError{paramsKey, "is empty"}
	}
	if len(raw) > MaxParamsJSON {
		return &ParamError{paramsKey, fmt.Sprintf("has %d bytes, more than %d", len(raw), MaxParamsJSON)}
	}
	if !utf8.Valid(raw) {
		return &ParamError{paramsKey, "is not UTF-8"}
	}
	depth, inString := 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			if depth++; depth > maxJSONDepth {
				return &ParamError{paramsKey, fmt.Sprintf("is nested deeper than %d", maxJSONDepth)}
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return nil
}

func setBool(dst *bool, v []byte) string {
	switch string(v) {
	case "true", "false":
		*dst = v[0] == 't'
		return ""
	}
	return "expected a boolean, got " + jsonKind(v)
}

func setInt(dst *int, v []byte, lo, hi int) string {
	n, reason := parseInt(v, lo, hi)
	if reason == "" {
		*dst = n
	}
	return reason
}

// parseInt reads a JSON number without fraction and exponent.
func parseInt(v []byte, lo, hi int) (int, string) {
	if jsonKind(v) != "a number" {
		return 0, "expected an integer, got " + jsonKind(v)
	}
	if bytes.ContainsAny(v, ".eE") {
		return 0, "expected an integer, got " + shorten(string(v))
	}
	n, err := strconv.Atoi(string(v))
	if err != nil || n < lo || n > hi {
		return 0, fmt.Sprintf("%s is outside %d…%d", shorten(string(v)), lo, hi)
	}
	return n, ""
}

// setFloat reads any finite JSON number.
func setFloat(dst **float64, v []byte) string {
	if jsonKind(v) != "a number" {
		return "expected a number, got " + jsonKind(v)
	}
	f, err := strconv.ParseFloat(string(v), 64)
	if err != nil {
		return shorten(string(v)) + " does not fit a float64"
	}
	*dst = &f
	return ""
}

func setText[T ~string](dst *T, v []byte, limit int) string {
	if reason := setOptText(dst, v, limit); reason != "" {
		return reason
	}
	if *dst == "" {
		return "is empty"
	}
	return ""
}

// setOptText reads a text of which the empty one means none.
func setOptText[T ~string](dst *T, v []byte, limit int) string {
	if v[0] != '"' {
		return "expected a string, got " + jsonKind(v)
	}
	if len(v) > 6*limit+2 { // no shorter even if every byte is an escape
		return fmt.Sprintf("has more than %d bytes", limit)
	}
	var s string
	if json.Unmarshal(v, &s) != nil {
		return "is not a JSON string"
	}
	if len(s) > limit {
		return fmt.Sprintf("has %d bytes, more than %d", len(s), limit)
	}
	// What encoding/json puts for half a surrogate pair.
	if bytes.ContainsRune([]byte(s), utf8.RuneError) {
		return "contains U+FFFD or half a surrogate pair"
	}
	*dst = T(s)
	return ""
}

func setRequestID(dst *kv.RequestID, v []byte) string {
	if reason := setText(dst, v, MaxIDLen); reason != "" {
		return reason
	}
	reason, _ := badRequestID(*dst)
	return reason
}

func setMode(dst *kv.TransferMode, v []byte) string {
	var s string
	if reason := setOptText(&s, v, MaxName); reason != "" {
		return reason
	}
	switch m := kv.TransferMode(s); m {
	case kv.Pull, kv.Push:
		*dst = m
		return ""
	}
	return strconv.Quote(shorten(s)) + ` is neither "pull" nor "push"`
}

func setPolicy(dst *kv.LoadFailurePolicy, v []byte) string {
	var s string
	if reason := setOptText(&s, v, MaxName); reason != "" {
		return reason
	}
	p := kv.LoadFailurePolicy(s)
	if !p.Valid() {
		return strconv.Quote(shorten(s)) + ` is neither "fail" nor "recompute"`
	}
	*dst = p
	return ""
}

func setTokens(dst *[]kv.Token, v []byte) string {
	ids := make([]kv.Token, 0, intsIn(v, MaxPromptTokens))
	reason := eachItem(v, MaxPromptTokens, func(item []byte) string {
		n, reason := parseInt(item, 0, math.MaxInt32)
		ids = append(ids, kv.Token(n))
		return reason
	})
	*dst = ids
	return reason
}

func setBlockIDs(dst *kv.BlockIDs, v []byte) string {
	if v[0] != '[' {
		return "expected a list of lists of integers, got " + jsonKind(v)
	}
	ids, left := kv.BlockIDs{}, MaxBlocks
	group := func(list []byte) string {
		g := make([]kv.BlockID, 0, intsIn(list, left))
		reason := eachItem(list, left, func(item []byte) string {
			n, reason := parseInt(item, 0, math.MaxUint32)
			g = append(g, kv.BlockID(n))
			return reason
		})
		left -= len(g)
		ids = append(ids, g)
		return reason
	}
	first := bytes.TrimLeft(v[1:], " \t\r\n")
	reason := ""
	if first[0] == '[' || first[0] == ']' {
		reason = eachItem(v, MaxGroups, group)
	} else {
		reason = group(v)
	}
	*dst = ids
	return reason
}

// intsIn guesses from the commas how many items a list of ints has, at most limit.
func intsIn(list []byte, limit int) int {
	return min(bytes.Count(list, []byte(","))+1, limit)
}

// eachItem calls f with each item of a syntactically valid JSON list, until one answers a reason.
func eachItem(list []byte, limit int, f func(item []byte) string) string {
	if list[0] != '[' {
		return "expected a list, got " + jsonKind(list)
	}
	rest := bytes.TrimLeft(list[1:], " \t\r\n")
	for n := 0; rest[0] != ']'; n++ {
		if n == limit {
			return fmt.Sprintf("has more than %d items", limit)
		}
		item := rest[:itemLen(rest)]
		rest = bytes.TrimLeft(rest[len(item):], " \t\r\n,")
		if reason := f(bytes.TrimRight(item, " \t\r\n")); reason != "" {
			return reason
		}
	}
	return ""
}

// itemLen is the length of the item at the start of b, up to the comma or bracket behind it.
func itemLen(b []byte) int {
	depth, inString := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '[' || c == '{':
			depth++
		case depth > 0 && (c == ']' || c == '}'):
			depth--
		case depth == 0 && (c == ',' || c == ']'):
			return i
		}
	}
	return len(b)
}

// jsonKind names the type of a JSON value for messages.
func jsonKind(v []byte) string {
	switch v[0] {
	case '{':
		return "an object"
	case '[':
		return "a list"
	case '"':
		return "a string"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "a number"
}
