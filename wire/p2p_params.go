package wire

import (
	"bytes"
	"encoding/json"
	"math"
)

// P2PParams is what kv_transfer_params says to the P2P tier (p2p-tier.md, section 9).
type P2PParams struct {
	// Decoder: a peer will fetch under this id what the request computes; "" none.
	Decoder string
	// Prefiller prefills the request, Source may have blocks of it; nil: not named, or not in full.
	// With both, the Prefiller counts.
	Prefiller, Source *P2PRemote

	// MaxOffload and MaxLoad bound the tokens, from the first of the prompt on, whose blocks the tier
	// keeps and gives; nil: no bound.
	MaxOffload, MaxLoad *int
	// LoadTiers says which tiers behind the CPU's may be asked: nil all, none if it is empty.
	LoadTiers []TierMatch
}

// P2PRemote is a peer and the id of the transaction with it.
type P2PRemote struct {
	ID   string
	Host string
	Port int
}

// ParseP2PParams reads the sub-maps remote_decoder, remote_prefiller and remote_kv_source of a
// kv_transfer_params object, and max_offload_tokens, max_load_tokens and kv_load_tiers beside them. Absent, null and incomplete ones name nobody; other keys are for
// ParseTransferParams. Every error is a *ParamError.
//
// Stricter than stock, which looks at no type and sends what it is given: ids are texts of at most
// MaxIDLen bytes, a port is 1…65535.
func ParseP2PParams(raw []byte) (P2PParams, error) {
	var p P2PParams
	raw = bytes.TrimSpace(raw)
	if err := checkParamsText(raw); err != nil {
		return p, err
	}
	if string(raw) == "null" {
		return p, nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil || raw[0] != '{' {
		return p, &ParamError{paramsKey, "is not a JSON object"}
	}
	decoder, err := p2pRemote(fields, "remote_decoder")
	if err != nil {
		return P2PParams{}, err
	}
	p.Decoder = decoder.ID
	for _, f := range []struct {
		name string
		to   **P2PRemote
	}{{"remote_prefiller", &p.Prefiller}, {"remote_kv_source", &p.Source}} {
		r, err := p2pRemote(fields, f.name)
		if err != nil {
			return P2PParams{}, err
		}
		if r.ID != "" && r.Host != "" && r.Port != 0 {
			*f.to = &r
		}
	}
	if err := p.tierParams(fields); err != nil {
		return P2PParams{}, err
	}
	return p, nil
}

func p2pRemote(fields map[string]json.RawMessage, name string) (P2PRemote, error) {
	var r P2PRemote
	v := fields[name]
	if len(v) == 0 || string(v) == "null" {
		return r, nil
	}
	var sub map[string]json.RawMessage
	if v[0] != '{' || json.Unmarshal(v, &sub) != nil {
		return r, &ParamError{name, "expected an object, got " + jsonKind(v)}
	}
	for _, f := range []struct {
		name string
		set  func([]byte) string
	}{
		{"kv_request_id", func(v []byte) string { return setOptText(&r.ID, v, MaxIDLen) }},
		{"remote_host", func(v []byte) string { return setOptText(&r.Host, v, MaxHostLen) }},
		{"remote_port", func(v []byte) string { return setInt(&r.Port, v, 1, math.MaxUint16) }},
	} {
		if v := sub[f.name]; len(v) > 0 && string(v) != "null" {
			if reason := f.set(v); reason != "" {
				return r, &ParamError{name + "." + f.name, reason}
			}
		}
	}
	return r, nil
}
