package wire

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"

	"github.com/kvferry/kvferry/kv"
)

// CompatFactors is what two engines must have in common before they look at each other's metadata
// (nixl-connector.md, section 2.6). TP and PP sizes, block size, layout and block counts are not
// among it.
type CompatFactors struct {
	VLLMVersion     string // "0.32.0"
	Model           string // name or path as configured
	DType           string // "torch.bfloat16"
	NumKVHeads      int    // in total
	HeadSize        int
	NumHiddenLayers int    // in total
	AttnBackendName string // push with a block-outermost layout: all names sorted, joined by ","; else the first
	CacheDType      string // "auto", "fp8"
	HMAEnabled      bool   // hybrid KV-cache manager not disabled
	Speculative     *SpeculativeFactors
	TransferMode    kv.TransferMode
}

// SpeculativeFactors describes an EAGLE-family speculator. An empty text stands for null, and so
// does a nil list.
type SpeculativeFactors struct {
	Method            string // "eagle3", "mtp"
	Model             string
	Revision          string
	CodeRevision      string
	ParallelDrafting  bool
	KVCacheDType      string // the draft's own, else the target's
	AuxiliaryLayerIDs []int
}

// Canonical gives the text that is hashed: Python's default JSON with sorted keys.
func (f CompatFactors) Canonical(connectorVersion int) []byte {
	b := append([]byte(nil), `{"attn_backend_name": `...)
	b = appendASCIIJSON(b, f.AttnBackendName)
	b = append(b, `, "cache_dtype": `...)
	b = appendASCIIJSON(b, f.CacheDType)
	b = append(b, `, "dtype": `...)
	b = appendASCIIJSON(b, f.DType)
	b = append(b, `, "head_size": `...)
	b = strconv.AppendInt(b, int64(f.HeadSize), 10)
	b = append(b, `, "is_hma_enabled": `...)
	b = strconv.AppendBool(b, f.HMAEnabled)
	b = append(b, `, "model": `...)
	b = appendASCIIJSON(b, f.Model)
	b = append(b, `, "nixl_connector_version": `...)
	b = strconv.AppendInt(b, int64(connectorVersion), 10)
	b = append(b, `, "num_hidden_layers": `...)
	b = strconv.AppendInt(b, int64(f.NumHiddenLayers), 10)
	b = append(b, `, "num_kv_heads": `...)
	b = strconv.AppendInt(b, int64(f.NumKVHeads), 10)
	b = append(b, `, "speculative_config": `...)
	b = f.Speculative.appendCanonical(b)
	b = append(b, `, "transfer_mode": `...)
	b = appendASCIIJSON(b, string(f.TransferMode))
	b = append(b, `, "vllm_version": `...)
	b = appendASCIIJSON(b, f.VLLMVersion)
	return append(b, '}')
}

func (s *SpeculativeFactors) appendCanonical(b []byte) []byte {
	if s == nil {
		return append(b, "null"...)
	}
	b = append(b, `{"auxiliary_layer_ids": `...)
	if s.AuxiliaryLayerIDs == nil {
		b = append(b, "null"...)
	} else {
		b = append(b, '[')
		for i, id := range s.AuxiliaryLayerIDs {
			if i > 0 {
				b = append(b, ", "...)
			}
			b = strconv.AppendInt(b, int64(id), 10)
		}
		b = append(b, ']')
	}
	b = append(b, `, "code_revision": `...)
	b = appendASCIIJSONOrNull(b, s.CodeRevision)
	b = append(b, `, "kv_cache_dtype": `...)
	b = appendASCIIJSONOrNull(b, s.KVCacheDType)
	b = append(b, `, "method": `...)
	b = appendASCIIJSONOrNull(b, s.Method)
	b = append(b, `, "model": `...)
	b = appendASCIIJSONOrNull(b, s.Model)
	b = append(b, `, "parallel_drafting": `...)
	b = strconv.AppendBool(b, s.ParallelDrafting)
	b = append(b, `, "revision": `...)
	b = appendASCIIJSONOrNull(b, s.Revision)
	return append(b, '}')
}

func appendASCIIJSONOrNull(b []byte, s string) []byte {
	if s == "" {
		return append(b, "null"...)
	}
	return appendASCIIJSON(b, s)
}

// Hash gives the compatibility hash for a peer of the given connector version: 64 lower-case hex
// digits.
func (f CompatFactors) Hash(connectorVersion int) string {
	sum := sha256.Sum256(f.Canonical(connectorVersion))
	return hex.EncodeToString(sum[:])
}
