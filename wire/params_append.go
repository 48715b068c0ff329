package wire

import (
	"math"
	"strconv"

	"github.com/kvferry/kvferry/kv"
)

// AppendTransferParams appends the kv_transfer_params of an engine's response: the keys of
// nixl-connector.md section 8.1 in their order, without spaces. remote_blocks_expiry_time is left
// out in push and null in pull if p has none; remote_prefill_cached_tokens is left out if p has
// none, and kvferry_lease and kvferry_release, which stock ignores, likewise. An empty text and a port or size of 0 are written as null. Keys that only requests carry
// (prompt_token_ids, transfer_id, kv_load_failure_policy) are never written.
//
// The texts of p must be UTF-8.
func AppendTransferParams(dst []byte, p *kv.TransferParams) []byte {
	b := append(dst, `{"do_remote_prefill":`...)
	b = strconv.AppendBool(b, p.DoRemotePrefill)
	b = append(b, `,"do_remote_decode":`...)
	b = strconv.AppendBool(b, p.DoRemoteDecode)
	b = append(b, `,"remote_block_ids":`...)
	b = appendJSONBlockIDs(b, p.RemoteBlockIDs)
	b = append(b, `,"remote_engine_id":`...)
	b = appendJSONOrNull(b, string(p.RemoteEngineID))
	b = append(b, `,"remote_request_id":`...)
	b = appendJSONOrNull(b, string(p.RemoteRequestID))
	b = append(b, `,"remote_host":`...)
	b = appendJSONOrNull(b, p.RemoteHost)
	for _, n := range []struct {
		key   string
		value int
	}{
		{`,"remote_port":`, p.RemotePort},
		{`,"tp_size":`, p.TPSize},
		{`,"dcp_size":`, p.DCPSize},
		{`,"pp_size":`, p.PPSize},
	} {
		b = append(b, n.key...)
		if n.value == 0 {
			b = append(b, "null"...)
			continue
		}
		b = strconv.AppendInt(b, int64(n.value), 10)
	}
	b = append(b, `,"remote_num_tokens":`...)
	b = strconv.AppendInt(b, int64(p.RemoteNumTokens), 10)
	if p.Mode != kv.Push {
		b = append(b, `,"remote_blocks_expiry_time":`...)
		b = appendJSONFloat(b, p.RemoteBlocksExpiry)
	}
	b = append(b, `,"transfer_mode":`...)
	b = appendJSONOrNull(b, string(p.Mode))
	if p.CachedTokens != nil {
		b = append(b, `,"remote_prefill_cached_tokens":`...)
		b = strconv.AppendInt(b, int64(*p.CachedTokens), 10)
	}
	if p.Lease != 0 {
		b = append(b, `,"kvferry_lease":`...)
		b = strconv.AppendUint(b, uint64(p.Lease), 10)
	}
	if p.Release != "" {
		b = append(b, `,"kvferry_release":`...)
		b = appendJSON(b, p.Release)
	}
	return append(b, '}')
}

func appendJSONOrNull(b []byte, s string) []byte {
	if s == "" {
		return append(b, "null"...)
	}
	return appendJSON(b, s)
}

func appendJSONBlockIDs(b []byte, ids kv.BlockIDs) []byte {
	if ids == nil {
		return append(b, "null"...)
	}
	b = append(b, '[')
	for i, g := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, '[')
		for j, id := range g {
			if j > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendUint(b, uint64(id), 10)
		}
		b = append(b, ']')
	}
	return append(b, ']')
}

// appendJSONFloat writes a float as Python does, with a fraction or an exponent; null for what JSON
// has no number for.
func appendJSONFloat(b []byte, f *float64) []byte {
	if f == nil || math.IsNaN(*f) || math.IsInf(*f, 0) {
		return append(b, "null"...)
	}
	if a := math.Abs(*f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.AppendFloat(b, *f, 'e', -1, 64)
	}
	b = strconv.AppendFloat(b, *f, 'f', -1, 64)
	if *f == math.Trunc(*f) {
		b = append(b, ".0"...)
	}
	return b
}
