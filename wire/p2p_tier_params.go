package wire

import (
	"encoding/json"
	"fmt"
	"slices"
)

// TierMatch is one matcher of kv_load_tiers; an empty field matches any tier.
type TierMatch struct {
	Medium   string // "CPU" or "STORAGE"
	Locality string // "LOCAL" or "REMOTE"
}

// MaxTierMatches bounds kv_load_tiers: there are four different matchers with both fields.
const MaxTierMatches = 16

// tierParams reads max_offload_tokens, max_load_tokens and kv_load_tiers (p2p-tier.md, section 9).
//
// A value of the wrong type is an error, where stock warns and ignores it. A matcher that names
// nothing known is left out, as stock does; if none is left, all tiers may be asked.
func (p *P2PParams) tierParams(fields map[string]json.RawMessage) error {
	for _, f := range []struct {
		name string
		to   **int
	}{{"max_offload_tokens", &p.MaxOffload}, {"max_load_tokens", &p.MaxLoad}} {
		v := fields[f.name]
		if len(v) == 0 || string(v) == "null" {
			continue
		}
		n, reason := parseInt(v, 0, MaxTokens)
		if reason != "" {
			return &ParamError{f.name, reason}
		}
		*f.to = &n
	}
	return p.loadTiers(fields["kv_load_tiers"])
}

func (p *P2PParams) loadTiers(v json.RawMessage) error {
	const name = "kv_load_tiers"
	if len(v) == 0 || string(v) == "null" {
		return nil
	}
	var list []json.RawMessage
	if v[0] != '[' || json.Unmarshal(v, &list) != nil {
		return &ParamError{name, "expected a list, got " + jsonKind(v)}
	}
	if len(list) > MaxTierMatches {
		return &ParamError{name, fmt.Sprintf("has %d matchers, more than %d", len(list), MaxTierMatches)}
	}
	matches := []TierMatch{}
	for i, raw := range list {
		at := fmt.Sprintf("%s[%d]", name, i)
		m, known, err := tierMatch(at, raw)
		if err != nil {
			return err
		}
		if known {
			matches = append(matches, m)
		}
	}
	if len(matches) > 0 || len(list) == 0 {
		p.LoadTiers = matches
	}
	return nil
}

func tierMatch(at string, raw json.RawMessage) (m TierMatch, known bool, err error) {
	var sub map[string]json.RawMessage
	if raw[0] != '{' || json.Unmarshal(raw, &sub) != nil {
		return m, false, &ParamError{at, "expected an object, got " + jsonKind(raw)}
	}
	known = true
	for _, f := range []struct {
		name  string
		to    *string
		words []string
	}{{"medium", &m.Medium, []string{"CPU", "STORAGE"}}, {"locality", &m.Locality, []string{"LOCAL", "REMOTE"}}} {
		v := sub[f.name]
		if len(v) == 0 || string(v) == "null" {
			continue
		}
		if reason := setOptText(f.to, v, MaxIDLen); reason != "" {
			return m, false, &ParamError{at + "." + f.name, reason}
		}
		known = known && slices.Contains(f.words, *f.to)
	}
	return m, known && m != TierMatch{}, nil
}
