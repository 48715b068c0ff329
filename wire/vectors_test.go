package wire

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

// loadVectors reads a file of bytes and values captured from stock engines.
func loadVectors(t testing.TB, name string, into any) {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

// hexBytes is a byte string written in hexadecimal.
type hexBytes []byte

func (h *hexBytes) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	v, err := hex.DecodeString(s)
	*h = v
	return err
}

type codecVector struct {
	Name, Type, Decoder string
	Value, Decoded      json.RawMessage
	Accepted            bool
	Error               string
	Hex                 *hexBytes

	// Long vectors have these instead of Hex.
	HexLen  int    `json:"hex_len"`
	SHA256  string `json:"sha256"`
	HeadHex string `json:"head_hex"`
	TailHex string `json:"tail_hex"`
}

func codecVectors(t testing.TB, file, typeOrDecoder string) []codecVector {
	t.Helper()
	var f struct{ Vectors []codecVector }
	loadVectors(t, file, &f)
	var out []codecVector
	for _, v := range f.Vectors {
		if v.Type == typeOrDecoder || v.Decoder == typeOrDecoder {
			out = append(out, v)
		}
	}
	if len(out) == 0 {
		t.Fatalf("%s has no vectors for %s", file, typeOrDecoder)
	}
	return out
}

// expectBytes compares an encoding with a vector, whole or by recipe.
func (v codecVector) expectBytes(t *testing.T, got []byte) {
	t.Helper()
	if v.Hex != nil {
		if !bytes.Equal(got, *v.Hex) {
			t.Errorf("%s: encoded\n%x\nwant\n%x", v.Name, got, []byte(*v.Hex))
		}
		return
	}
	sum := sha256.Sum256(got)
	text := hex.EncodeToString(got)
	if len(text) != v.HexLen && len(got) != v.HexLen || hex.EncodeToString(sum[:]) != v.SHA256 ||
		!strings.HasPrefix(text, v.HeadHex) || !strings.HasSuffix(text, v.TailHex) {
		t.Errorf("%s: %d bytes with SHA-256 %x, want %d with %s", v.Name, len(got), sum, v.HexLen, v.SHA256)
	}
}

// value decodes a JSON value of the vectors, unfolding {"$bin": …} and the repetitions.
func value(t testing.TB, raw json.RawMessage) any {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	return unfold(t, v)
}

func unfold(t testing.TB, v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = unfold(t, v[i])
		}
	case map[string]any:
		if s, ok := v["$bin"].(string); ok {
			b, err := hex.DecodeString(s)
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
		if s, ok := v["$float"].(string); ok {
			return json.Number(s)
		}
		for key, kind := range map[string]string{"$repeat": "list", "$repeat_str": "str", "$repeat_bin": "bin"} {
			rep, ok := v[key].([]any)
			if !ok {
				continue
			}
			n := num(t, rep[1])
			switch kind {
			case "list":
				out := make([]any, n)
				for i := range out {
					out[i] = rep[0]
				}
				return out
			case "str":
				return strings.Repeat(rep[0].(string), n)
			default:
				return bytes.Repeat(repeatedByte(t, rep[0]), n)
			}
		}
		for k := range v {
			v[k] = unfold(t, v[k])
		}
	}
	return v
}

func repeatedByte(t testing.TB, v any) []byte {
	if s, ok := v.(string); ok {
		b, err := hex.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	return []byte{byte(num(t, v))}
}

func num(t testing.TB, v any) int {
	t.Helper()
	n, err := v.(json.Number).Int64()
	if err != nil {
		t.Fatal(err)
	}
	return int(n)
}

func numList(t testing.TB, v any) []int {
	if v == nil {
		return nil
	}
	out := make([]int, 0)
	for _, x := range v.([]any) {
		out = append(out, num(t, x))
	}
	return out
}

func strList(v any) []string {
	if v == nil {
		return nil
	}
	out := make([]string, 0)
	for _, x := range v.([]any) {
		out = append(out, x.(string))
	}
	return out
}

func text(v any) string {
	s, _ := v.(string)
	return s
}

func blockIDs(t testing.TB, v any) kv.BlockIDs {
	ids := kv.BlockIDs{}
	for _, g := range v.([]any) {
		group := []kv.BlockID{}
		for _, id := range g.([]any) {
			group = append(group, kv.BlockID(num(t, id)))
		}
		ids = append(ids, group)
	}
	return ids
}

// expectAllocated fails if f allocates more than a small multiple of its input of n bytes.
func expectAllocated(t *testing.T, name string, n int, f func()) {
	t.Helper()
	const perByte, fixed = 64, 8 << 10
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	if got := after.TotalAlloc - before.TotalAlloc; got > uint64(perByte*n+fixed) {
		t.Errorf("%s: allocated %d bytes for an input of %d", name, got, n)
	}
}
