package engine

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// Either engine may have none, a part or all of a prompt in its prefix cache: P computes what it lacks,
// D gets what it lacks, and the tokens are the same. The last token is always computed.
func TestPrefixHits(t *testing.T) {
	if testing.Short() {
		t.Skip("computes for long under the race detector")
	}
	const block = 16
	eachMode(t, nil, func(t *testing.T, x pair) {
		seed := 100
		for _, n := range []int{block - 1, block, block + 1, 4 * block, 4*block + 5} {
			whole := (n - 1) / block * block // what a cache can give out
			hits := slices.Compact([]int{0, whole / 2 / block * block, whole})
			for _, onP := range hits {
				for _, onD := range hits {
					seed++
					name := fmt.Sprintf("%d tokens, P has %d, D has %d", n, onP, onD)
					p := prompt(n, seed)
					for i, have := range []int{onP, onD} {
						if have > 0 {
							generate(t, []*Engine{x.p, x.d}[i], Request{ID: "warm", Prompt: p[:have], MaxTokens: 1, IgnoreEOS: true})
						}
					}
					prefill, decode := x.handOff(t, fmt.Sprintf("r%d", seed), p, 3)
					want := expect(t, p, 3, model.Sampling{})
					checkAnswer(t, name+": P", prefill, want[:1])
					checkAnswer(t, name+": D", decode, want)
					if u := prefill.Usage; u.Cached != onP || u.ComputedPrompt != n-onP {
						t.Errorf("%s: P's usage is %+v", name, u)
					}
					if u := decode.Usage; u.Cached != onD || u.External != n-1-onD || u.ComputedPrompt != 1 {
						t.Errorf("%s: D's usage is %+v", name, u)
					}
					if got, want := decode.Transfer.Blocks, blocksBehind(x.p.cfg.Mode, n, onD, block); got != want {
						t.Errorf("%s: %d blocks came, want %d", name, got, want)
					}
					settle(t, x.p)
					settle(t, x.d)
				}
			}
		}
	})
}

// blocksBehind is how many blocks D gets of those that it lacks: in pull none if all but the last token is
// there, whose KV D computes itself. In push the block that ends the prompt comes in any case.
func blocksBehind(mode kv.TransferMode, tokens, have, block int) int {
	if mode == kv.Pull && have == tokens-1 {
		return 0
	}
	return (tokens+block-1)/block - have/block
}
