package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/kv"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"
)

func pushRegOf(t testing.TB, v any) *PushReg {
	m := v.(map[string]any)
	return &PushReg{
		RequestID:      kv.RequestID(text(m["request_id"])),
		DecodeEngineID: kv.EngineID(text(m["decode_engine_id"])),
		DecodeHost:     text(m["decode_host"]),
		DecodePort:     num(t, m["decode_port"]),
		DecodeTPSize:   num(t, m["decode_tp_size"]),
		LocalBlockIDs:  blockIDs(t, m["local_block_ids"]),
		RemoteEngineID: kv.EngineID(text(m["remote_engine_id"])),
		RemoteHost:     text(m["remote_host"]),
		RemotePort:     num(t, m["remote_port"]),
		RemoteTPSize:   num(t, m["remote_tp_size"]),
		RemotePPSize:   num(t, m["remote_pp_size"]),
	}
}

func TestPushRegVectors(t *testing.T) {
	for _, v := range codecVectors(t, "codec-valid", "push_reg") {
		want := pushRegOf(t, value(t, v.Value))
		b, err := AppendPushReg(nil, want)
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			continue
		}
		v.expectBytes(t, b)
		got, err := ParsePushReg(b)
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%s: %v %s", v.Name, err, d)
		}
	}
}

// The example of nixl-connector.md, section 5.1.
func TestPushRegExample(t *testing.T) {
	b, err := AppendPushReg(nil, &PushReg{RequestID: "cmpl-d-0-11111111", DecodeEngineID: "De", DecodeHost: "10.0.0.2",
		DecodePort: 5602, DecodeTPSize: 2, LocalBlockIDs: kv.BlockIDs{{100, 300}}, RemoteEngineID: "Pe",
		RemoteHost: "10.0.0.1", RemotePort: 5600, RemoteTPSize: 1, RemotePPSize: 1})
	text := hex.EncodeToString(b)
	if err != nil || len(b) != 221 || !strings.HasPrefix(text, "505553485f5245473a8baa726571756573745f6964b1") ||
		!strings.Contains(text, "919264cd012c") || !strings.Contains(text, "cd15e2") {
		t.Errorf("%d bytes %s, %v", len(b), text, err)
	}
}

// Stock stores whatever has a text as request_id; ParsePushReg wants what is used later too.
func TestPushRegAcceptance(t *testing.T) {
	var f struct {
		Vectors []struct {
			Name     string
			Hex      hexBytes
			StoredAs []string `json:"stored_as"`
		} `json:"push_reg_acceptance"`
	}
	loadVectors(t, "push-matching", &f)
	stricter := map[string]string{
		"only_request_id":  "decode_engine_id",
		"empty_id":         "decode_engine_id",
		"duplicate_id_key": "decode_engine_id",
	}
	for _, v := range f.Vectors {
		p, err := ParsePushReg(v.Hex)
		field, differs := stricter[v.Name]
		switch {
		case differs:
			var de *DecodeError
			if len(v.StoredAs) != 1 || !errors.As(err, &de) || de.Field != field || !errors.Is(err, ErrMissing) {
				t.Errorf("%s: %v, stock stores %q", v.Name, err, v.StoredAs)
			}
		case (err == nil) != (len(v.StoredAs) == 1):
			t.Errorf("%s: %v, stock stores %q", v.Name, err, v.StoredAs)
		case err == nil && string(p.RequestID) != v.StoredAs[0]:
			t.Errorf("%s: stored as %q, stock as %q", v.Name, p.RequestID, v.StoredAs)
		}
	}
	if len(f.Vectors) == 0 {
		t.Fatal("no vectors")
	}
}

func samplePushReg() *PushReg {
	return &PushReg{RequestID: "cmpl-a-0-11111111", DecodeEngineID: "d", DecodeHost: "10.0.0.2", DecodePort: 5640,
		DecodeTPSize: 1, LocalBlockIDs: kv.BlockIDs{{1, 2}, {}}, RemoteEngineID: "p", RemoteHost: "10.0.0.1",
		RemotePort: 5600, RemoteTPSize: 1, RemotePPSize: 1}
}

// pairs builds a registration from keys and encoded values, so that each can be spoiled.
func pairs(t testing.TB, p *PushReg) (keys []string, values [][]byte) {
	for i, k := range pushRegKeys[:pushRegStockKeys] {
		keys = append(keys, k)
		values = append(values, p.appendField(nil, i))
	}
	return keys, values
}

func joinPairs(keys []string, values [][]byte) []byte {
	b := msgp.AppendMapHeader([]byte(prefixPushReg), uint32(len(keys)))
	for i, k := range keys {
		b = append(msgp.AppendString(b, k), values[i]...)
	}
	return b
}

func TestPushRegMissingKeys(t *testing.T) {
	keys, values := pairs(t, samplePushReg())
	for i, k := range keys {
		b := joinPairs(slices.Delete(slices.Clone(keys), i, i+1), slices.Delete(slices.Clone(values), i, i+1))
		_, err := ParsePushReg(b)
		var de *DecodeError
		switch required := i < pushRegRequired; {
		case required && (!errors.As(err, &de) || de.Field != k || !errors.Is(err, ErrMissing)):
			t.Errorf("without %s: %v", k, err)
		case !required && err != nil:
			t.Errorf("without %s: %v", k, err)
		}
	}
}

func TestPushRegBadValues(t *testing.T) {
	float, yes := msgp.AppendFloat64(nil, 1), []byte{mTrue}
	for key, bad := range map[string][][]byte{
		"request_id":       {{mNil}, {5}, {0xa0}, []byte("\xa4HB:x"), []byte("\xc4\x01a"), []byte("\xa1\xff")},
		"decode_engine_id": {{mNil}, {0xa0}, {5}},
		"decode_host":      {{mNil}, {0xa0}, msgp.AppendString(nil, strings.Repeat("h", MaxHostLen+1))},
		"decode_port":      {{mNil}, {0}, {0xff}, {0xce, 0, 1, 0, 0}, float, yes, []byte("\xa45600")},
		"decode_tp_size":   {{mNil}, {0}, {0xff}, {0xce, 0, 1, 0, 1}, float, yes},
		"local_block_ids": {{mNil}, {5}, {0x91, mNil}, {0x91, 0x91, 0xff}, {0x91, 0x91, mTrue}, {0x91, 0xff},
			{0x92, 0x91, 1, 2}, {0x92, 2, 0x91, 1}, append([]byte{0x91, 0x91}, float...),
			{0x91, 0x91, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0}, {0x91, 0x91, 0x91, 1}},
		"remote_engine_id": {{5}},
		"remote_host":      {{5}, []byte("\xc4\x01a")},
		"remote_port":      {{0}, {0xff}, {0xce, 0, 1, 0, 0}, float},
		"remote_tp_size":   {{0}, {0xff}, yes},
		"remote_pp_size":   {{0}, {0xce, 0, 1, 0, 1}},
	} {
		keys, values := pairs(t, samplePushReg())
		at := slices.Index(keys, key)
		for _, v := range bad {
			spoiled := slices.Clone(values)
			spoiled[at] = v
			_, err := ParsePushReg(joinPairs(keys, spoiled))
			var de *DecodeError
			if !errors.As(err, &de) || !strings.HasPrefix(de.Field, key) {
				t.Errorf("%s = % x: %v", key, v, err)
			}
		}
	}
}

func TestPushRegRemoteMayBeNil(t *testing.T) {
	keys, values := pairs(t, samplePushReg())
	for i := pushRegRequired; i < len(values); i++ {
		values[i] = []byte{mNil}
	}
	want := samplePushReg()
	want.RemoteEngineID, want.RemoteHost, want.RemotePort, want.RemoteTPSize, want.RemotePPSize = "", "", 0, 0, 0
	got, err := ParsePushReg(joinPairs(keys, values))
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
	if b, err := AppendPushReg(nil, want); err != nil || !bytes.Equal(b, joinPairs(keys, values)) {
		t.Errorf("% x, %v", b, err)
	}
}

func TestPushRegFlatBlockIDs(t *testing.T) {
	keys, values := pairs(t, samplePushReg())
	values[5] = []byte{0x93, 1, 0xcd, 1, 0x2c, 0xce, 0xff, 0xff, 0xff, 0xff}
	got, err := ParsePushReg(joinPairs(keys, values))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(kv.BlockIDs{{1, 300, 1<<32 - 1}}, got.LocalBlockIDs); d != "" {
		t.Error(d)
	}
}

func TestPushRegDuplicateKeyLastWins(t *testing.T) {
	keys, values := pairs(t, samplePushReg())
	keys, values = append(keys, "decode_port", "local_block_ids"), append(values, []byte{7}, []byte{0x91, 0x91, 9})
	got, err := ParsePushReg(joinPairs(keys, values))
	if err != nil || got.DecodePort != 7 || got.LocalBlockIDs.Len() != 1 || got.LocalBlockIDs[0][0] != 9 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestPushRegOwnKeys(t *testing.T) {
	p := samplePushReg()
	plain, err := AppendPushReg(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	p.TransferID = "xfer-1"
	p.Extension = &PushRegExtension{Grant: [16]byte{1, 15: 2}, Token: Token{5, 15: 6}, StartToken: 64, NumTokens: 33, PromptDigest: [32]byte{3, 31: 4}, Generation: 1 << 63}
	got, err := AppendPushReg(nil, p)
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Clone(plain)
	want[len(prefixPushReg)] = 0x8d
	want = append(want, "\xabtransfer_id\xa6xfer-1\xa7kvferry\x86\xa5grant\xc4\x10\x01"...)
	want = append(want, make([]byte, 14)...)
	want = append(want, "\x02\xa5token\xc4\x10\x05"...)
	want = append(want, make([]byte, 14)...)
	want = append(want, "\x06\xabstart_token\x40\xaanum_tokens\x21\xadprompt_digest\xc4\x20\x03"...)
	want = append(want, make([]byte, 30)...)
	want = append(want, "\x04\xaageneration\xcf\x80\x00\x00\x00\x00\x00\x00\x00"...)
	if !bytes.Equal(got, want) {
		t.Errorf("%q\nwant\n%q", got, want)
	}
	back, err := ParsePushReg(got)
	if d := cmp.Diff(p, back); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
}

func TestPushRegExtensionRefusals(t *testing.T) {
	p := samplePushReg()
	p.Extension = &PushRegExtension{}
	good := p.Extension.append(nil)
	for name, c := range map[string]struct {
		bytes, field string
	}{
		"nil":          {"\xc0", "kvferry"},
		"empty":        {"\x80", "kvferry.grant"},
		"no end":       {strings.Replace(string(good), "generation", "generatiox", 1), "kvferry.generation"},
		"no token":     {strings.Replace(string(good), "\xa5token", "\xa5tokex", 1), "kvferry.token"},
		"short token":  {"\x81\xa5token\xc4\x02ab", "kvferry.token"},
		"short grant":  {"\x81\xa5grant\xc4\x02ab", "kvferry.grant"},
		"long grant":   {"\x81\xa5grant\xc4\x11" + strings.Repeat("g", 17), "kvferry.grant"},
		"str grant":    {"\x81\xa5grant\xb0" + strings.Repeat("g", 16), "kvferry.grant"},
		"negative":     {"\x81\xabstart_token\xff", "kvferry.start_token"},
		"float tokens": {"\x81\xaanum_tokens\xca\x00\x00\x00\x00", "kvferry.num_tokens"},
		"generation":   {"\x81\xaageneration\xff", "kvferry.generation"},
	} {
		keys, values := pairs(t, p)
		_, err := ParsePushReg(joinPairs(append(keys, extensionKey), append(values, []byte(c.bytes))))
		var de *DecodeError
		if !errors.As(err, &de) || de.Field != c.field {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPushRegIsCheckedBeforeSending(t *testing.T) {
	for name, mutate := range map[string]func(*PushReg){
		"id":     func(p *PushReg) { p.RequestID = "" },
		"engine": func(p *PushReg) { p.DecodeEngineID = "\xff" },
		"host":   func(p *PushReg) { p.DecodeHost = "" },
		"port":   func(p *PushReg) { p.DecodePort = 65536 },
		"tp":     func(p *PushReg) { p.DecodeTPSize = 0 },
		"remote": func(p *PushReg) { p.RemotePort = -1 },
		"groups": func(p *PushReg) { p.LocalBlockIDs = make(kv.BlockIDs, MaxGroups+1) },
		"blocks": func(p *PushReg) { p.LocalBlockIDs = kv.BlockIDs{make([]kv.BlockID, MaxBlocks+1)} },
		"tokens": func(p *PushReg) { p.Extension = &PushRegExtension{StartToken: -1} },
		"xfer":   func(p *PushReg) { p.TransferID = kv.TransferID(strings.Repeat("x", MaxIDLen+1)) },
	} {
		p := samplePushReg()
		mutate(p)
		if b, err := AppendPushReg([]byte("x"), p); err == nil || string(b) != "x" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPushRegHostileSizes(t *testing.T) {
	keys, values := pairs(t, samplePushReg())
	inputs := map[string][]byte{"map": []byte(prefixPushReg + "\xdf\xff\xff\xff\xff")}
	for i, k := range keys {
		for name, header := range map[string]string{"str": "\xdb", "bin": "\xc6", "array": "\xdd", "map": "\xdf"} {
			spoiled := slices.Clone(values)
			spoiled[i] = []byte(header + "\xff\xff\xff\xff")
			inputs[k+" as "+name] = joinPairs(keys, spoiled)
		}
	}
	values[5] = append([]byte("\xdd\x00\x01\x00\x00"), bytes.Repeat([]byte{0x90}, 1<<16)...)
	inputs["groups"] = joinPairs(keys, values)
	values[5] = append([]byte("\x92\xdd\x00\x10\x00\x00"), make([]byte, 1<<20)...)
	values[5] = append(values[5], 0x91, 1)
	inputs["blocks"] = joinPairs(keys, values)
	for name, b := range inputs {
		expectAllocated(t, name, len(b), func() {
			if _, err := ParsePushReg(b); err == nil {
				t.Errorf("%s: accepted", name)
			}
		})
	}
}

func TestPushRegRoundTrip(t *testing.T) {
	txt := rapid.StringN(1, 20, MaxHostLen)
	port, size := rapid.IntRange(1, 65535), rapid.IntRange(1, MaxRanks)
	ids := rapid.SliceOfN(rapid.SliceOfN(rapid.Map(rapid.Uint32(), func(u uint32) kv.BlockID { return kv.BlockID(u) }), 0, 40), 0, 4)
	rapid.Check(t, func(t *rapid.T) {
		p := &PushReg{
			RequestID:      kv.RequestID("r" + txt.Draw(t, "id")),
			DecodeEngineID: kv.EngineID(txt.Draw(t, "engine")),
			DecodeHost:     txt.Draw(t, "host"),
			DecodePort:     port.Draw(t, "port"),
			DecodeTPSize:   size.Draw(t, "tp"),
			LocalBlockIDs:  ids.Draw(t, "ids"),
		}
		if rapid.Bool().Draw(t, "remote") {
			p.RemoteEngineID, p.RemoteHost = kv.EngineID(txt.Draw(t, "p")), txt.Draw(t, "p host")
			p.RemotePort, p.RemoteTPSize, p.RemotePPSize = port.Draw(t, "p port"), size.Draw(t, "p tp"), size.Draw(t, "p pp")
		}
		if rapid.Bool().Draw(t, "own") {
			p.TransferID = kv.TransferID(txt.Draw(t, "transfer"))
			p.Extension = &PushRegExtension{
				StartToken: rapid.IntRange(0, MaxTokens).Draw(t, "start"),
				NumTokens:  rapid.IntRange(0, MaxTokens).Draw(t, "num"),
				Generation: kv.Generation(rapid.Uint64().Draw(t, "generation")),
				Lease:      kv.Generation(rapid.Uint64().Draw(t, "lease")),
			}
			copy(p.Extension.Grant[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "grant"))
			copy(p.Extension.Token[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "token"))
			copy(p.Extension.PromptDigest[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "digest"))
		}
		b, err := AppendPushReg(nil, p)
		if err != nil {
			t.Fatal(err)
		}
		got, err := ParsePushReg(b)
		if d := cmp.Diff(p, got); d != "" || err != nil {
			t.Errorf("%v %s", err, d)
		}
	})
}

func FuzzParsePushReg(f *testing.F) {
	var m struct {
		Vectors []struct{ Hex hexBytes } `json:"push_reg_acceptance"`
	}
	loadVectors(f, "push-matching", &m)
	for _, v := range m.Vectors {
		f.Add([]byte(v.Hex))
	}
	p := samplePushReg()
	p.TransferID, p.Extension = "x", &PushRegExtension{Generation: 1}
	seed, err := AppendPushReg(nil, p)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParsePushReg(b)
		if err != nil {
			return
		}
		once, err := AppendPushReg(nil, p)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParsePushReg(once)
		if d := cmp.Diff(p, again); d != "" || err != nil {
			t.Errorf("%v %s", err, d)
		}
	})
}
