package wire

import (
	"errors"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// H24 of p2p-tier.md, section 13: a key that is no bin is refused, whatever it is, and nothing is
// allocated for it.
func TestHazardP2P_H24_KeysThatAreNone(t *testing.T) {
	for name, key := range map[string]func([]byte) []byte{
		"small int":    func(b []byte) []byte { return msgp.AppendInt(b, 5) },
		"huge int":     func(b []byte) []byte { return msgp.AppendUint64(b, 1<<62) },
		"negative int": func(b []byte) []byte { return msgp.AppendInt(b, -1) },
		"list of ints": func(b []byte) []byte { return msgp.AppendInt(msgp.AppendInt(msgp.AppendArrayHeader(b, 2), 1), 2) },
		"text":         func(b []byte) []byte { return msgp.AppendString(b, "key") },
		"nil":          msgp.AppendNil,
		"bool":         func(b []byte) []byte { return msgp.AppendBool(b, true) },
	} {
		b := p2pAppendID(p2pHead(nil, "lookup", 3), "a")
		b = key(msgp.AppendArrayHeader(msgp.AppendString(b, "keys"), 1))
		b = p2pAppendRound(b, 0)
		if m, err := DecodeP2P(b); !errors.Is(err, ErrP2PBadKey) {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
		if n := testing.AllocsPerRun(10, func() { _, _ = DecodeP2P(b) }); n > 20 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
