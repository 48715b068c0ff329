package core

import (
	"cmp"
	"fmt"
	"strconv"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

// Handoff is what P's answer says of the KV.
type Handoff struct {
	// Raw is the answer's kv_transfer_params to the byte; nil: P kept nothing.
	Raw []byte
	// Cached is how many prompt tokens P found in its prefix cache; -1: not told.
	Cached int
	params kv.TransferParams
}

// ReadHandoff reads P's answer. Parameters that are absent, empty or about no block say that P kept
// nothing; parameters that no decode engine can read are an error.
func ReadHandoff(answer *openai.Object) (Handoff, error) {
	h := Handoff{Cached: -1}
	if n, ok := openai.CachedTokens(answer); ok {
		h.Cached = n
	}
	raw := answer.Present("kv_transfer_params")
	if raw == nil {
		return h, nil
	}
	p, err := wire.ParseTransferParams(raw)
	if err != nil {
		return h, err
	}
	if !p.DoRemotePrefill || p.Mode == kv.Pull && p.RemoteBlockIDs.Len() == 0 {
		return h, nil
	}
	if p.CachedTokens != nil {
		h.Cached = *p.CachedTokens
	}
	h.Raw, h.params = raw, p
	return h, nil
}

// Releasable tells whether P has said how it is told that nobody will ask for the KV.
func (h Handoff) Releasable() bool { return h.Raw != nil && releasable(&h.params) }

func releasable(p *kv.TransferParams) bool {
	return p.Release != "" && p.Lease != 0 && p.RemoteRequestID != ""
}

// ReleaseBody is what P's /kv/release is sent to let go what a Releasable hand-off is about.
func (h Handoff) ReleaseBody() []byte { return releaseBody(&h.params) }

// KeyReleaseBody is what P's /kv/release is sent to let go whatever it keeps, or will, of the leg that was sent
// with a key.
func KeyReleaseBody(key string) []byte {
	return append(appendString([]byte(`{"key":`), key), '}')
}

func releaseBody(p *kv.TransferParams) []byte {
	b := appendString([]byte(`{"request_id":`), string(p.RemoteRequestID))
	b = strconv.AppendUint(append(b, `,"lease":`...), uint64(p.Lease), 10)
	return append(appendString(append(b, `,"token":`...), p.Release), '}')
}

// Mode is what P says that the pair's mode is; push if it says nothing.
func (h Handoff) Mode() kv.TransferMode { return cmp.Or(h.params.Mode, kv.Push) }

// CheckMode refuses a hand-off of another mode than the pair's.
func (h Handoff) CheckMode(pair kv.TransferMode) error {
	if h.params.Mode != "" && h.params.Mode != pair {
		return fmt.Errorf("its answer says transfer_mode %s, but the pair works in %s: start both engines with one --mode, and correct mode= of the router's engines if it is given",
			h.params.Mode, pair)
	}
	return nil
}

// IsOf tells whether the answer comes from the engine that these coordinates are of. One that tells of itself
// no engine id or port is.
func (h Handoff) IsOf(p Peer) bool {
	told := h.params
	return (told.RemoteEngineID == "" || told.RemoteEngineID == p.EngineID) && (told.RemotePort == 0 || told.RemotePort == p.Port)
}

// Check refuses a hand-off that must not be sent to a decode engine as it is: stock ones die of some
// missing keys (nixl-connector.md, section 14).
func (h Handoff) Check(pair kv.TransferMode) error {
	if err := h.CheckMode(pair); err != nil {
		return err
	}
	return wire.CheckLeg(&h.params, pair, wire.DecodeLeg)
}
