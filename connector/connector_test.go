package connector

import (
	"testing"

	"github.com/kvferry/kvferry/kv"
)

// A prompt has of an earlier turn what it shares by its length: all that D kept, or whole blocks of it.
func TestEarlierTokens(t *testing.T) {
	kept := func(tokens int) kv.TransferParams {
		return kv.TransferParams{DoRemoteDecode: true, RemoteBlockIDs: kv.BlockIDs{{1, 2, 3}}, RemoteNumTokens: tokens}
	}
	plain, decode, empty := kept(40), kept(40), kept(40)
	plain.DoRemoteDecode, decode.DoRemoteDecode, decode.DoRemotePrefill, empty.RemoteBlockIDs = false, false, true, kv.BlockIDs{{}}
	for _, c := range []struct {
		name   string
		p      kv.TransferParams
		prompt int
		want   int
	}{
		{"a longer prompt", kept(40), 41, 40}, {"as long", kept(40), 40, 40}, {"a shorter one", kept(40), 39, 32}, {"whole blocks of it", kept(40), 32, 32},
		{"less than a block", kept(40), 15, 0}, {"it does not say how many", kept(0), 40, 0},
		{"no prefill leg", plain, 41, 0}, {"a decode leg", decode, 41, 0}, {"nothing kept", empty, 41, 0},
	} {
		if got := EarlierTokens(&c.p, c.prompt, 16); got != c.want {
			t.Errorf("%s: %d tokens, want %d", c.name, got, c.want)
		}
	}
}
