package wire

import (
	"encoding/json"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

func factorsOf(t testing.TB, v any) (CompatFactors, int) {
	m := v.(map[string]any)
	f := CompatFactors{
		VLLMVersion:     m["vllm_version"].(string),
		Model:           m["model"].(string),
		DType:           m["dtype"].(string),
		NumKVHeads:      num(t, m["num_kv_heads"]),
		HeadSize:        num(t, m["head_size"]),
		NumHiddenLayers: num(t, m["num_hidden_layers"]),
		AttnBackendName: m["attn_backend_name"].(string),
		CacheDType:      m["cache_dtype"].(string),
		HMAEnabled:      m["is_hma_enabled"].(bool),
		TransferMode:    kv.TransferMode(m["transfer_mode"].(string)),
	}
	if s, ok := m["speculative_config"].(map[string]any); ok {
		f.Speculative = &SpeculativeFactors{
			Method: text(s["method"]), Model: text(s["model"]), Revision: text(s["revision"]),
			CodeRevision: text(s["code_revision"]), ParallelDrafting: s["parallel_drafting"].(bool),
			KVCacheDType: text(s["kv_cache_dtype"]), AuxiliaryLayerIDs: numList(t, s["auxiliary_layer_ids"]),
		}
	}
	return f, num(t, m["nixl_connector_version"])
}

func TestCompatVectors(t *testing.T) {
	var file struct {
		Vectors []struct {
			Name, Canonical, SHA256 string
			CanonicalHex            hexBytes `json:"canonical_hex"`
			Factors                 json.RawMessage
		}
	}
	loadVectors(t, "compat-hash", &file)
	for _, v := range file.Vectors {
		f, version := factorsOf(t, value(t, v.Factors))
		if got := string(f.Canonical(version)); got != string(v.CanonicalHex) {
			t.Errorf("%s:\n%s\nwant\n%s", v.Name, got, v.CanonicalHex)
		}
		if got := f.Hash(version); got != v.SHA256 {
			t.Errorf("%s: hash %s, want %s", v.Name, got, v.SHA256)
		}
	}
	if len(file.Vectors) == 0 {
		t.Fatal("no vectors")
	}
}

// The table of nixl-connector.md, section 2.6.
func TestCompatTable(t *testing.T) {
	pull := CompatFactors{VLLMVersion: "0.32.0", Model: "facebook/opt-125m", DType: "torch.float16", NumKVHeads: 12,
		HeadSize: 64, NumHiddenLayers: 12, AttnBackendName: "FLASH_ATTN", CacheDType: "auto", TransferMode: kv.Pull}
	with := func(mutate func(*CompatFactors)) CompatFactors {
		f := pull
		mutate(&f)
		return f
	}
	push := with(func(f *CompatFactors) { f.TransferMode = kv.Push })
	for _, c := range []struct {
		f       CompatFactors
		version int
		want    string
	}{
		{pull, 14, "60ecb2ad8d6e14c14d3fcb1128124ebd2a195ccbf34cd11757297f3131e99a00"},
		{push, 14, "aa4d7c6c81d8a7ce02e6dab63a5841ad84da32501681f7133a3a46423d545778"},
		{with(func(f *CompatFactors) { f.TransferMode, f.AttnBackendName = kv.Push, "FLASHMLA,FLASHMLA_SPARSE" }), 14,
			"7439552da12944384c81fe41e03f6f0be12beab2eebc26cbcedaf3334076cb27"},
		{with(func(f *CompatFactors) {
			f.TransferMode = kv.Push
			f.Speculative = &SpeculativeFactors{Method: "eagle3", Model: "d/m", KVCacheDType: "auto", AuxiliaryLayerIDs: []int{1, 8, 14}}
		}), 14, "0ee2e3dd93b45cbc0eb04e6c5dcbe38e8a58055abff8bf5b10fa33993d9c3205"},
		{with(func(f *CompatFactors) { f.Model = "/m/é" }), 14, "c676c00ae704c8f8a9d30cd16f5a1a12b6e913ca1dc715b7e56f469992d7f348"},
		{with(func(f *CompatFactors) { f.VLLMVersion, f.TransferMode = "0.30.0", kv.Push }), 12,
			"609b388e9fe08c35b93ff3e6cbc47ce8d37a6b9be11a1c701d7a8a3b356e6994"},
		{with(func(f *CompatFactors) { f.VLLMVersion = "0.30.0" }), 12,
			"b867b0535c70eb700509ccd9667c38172179a4f93878f7730e7011f0f9e158be"},
	} {
		if got := c.f.Hash(c.version); got != c.want {
			t.Errorf("%s: %s, want %s", c.f.Canonical(c.version), got, c.want)
		}
	}
}

// Facts about Python's json.dumps, one by one.
func TestASCIIJSON(t *testing.T) {
	for in, want := range map[string]string{
		"":                  `""`,
		"a/b<>&'":           `"a/b<>&'"`,
		`q"\`:               `"q\"\\"`,
		"\b\f\n\r\t":        `"\b\f\n\r\t"`,
		"\x00\x1f\x7f":      `"\u0000\u001f\u007f"`,
		"é\u2028":           `"\u00e9\u2028"`,
		"\U0001f6a2":        `"\ud83d\udea2"`,
		"\uffff\U0010ffff":  `"\uffff\udbff\udfff"`,
		"\ufffd":            `"\ufffd"`,
		"a\xffb":            `"a\udcffb"`,
		"\xed\xa0\x80":      `"\udced\udca0\udc80"`,
		"\xe6\xa9":          `"\udce6\udca9"`,
		"plain text 0-9 ~!": `"plain text 0-9 ~!"`,
	} {
		if got := string(appendASCIIJSON(nil, in)); got != want {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
	}
}
