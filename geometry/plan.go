package geometry

import (
	"fmt"

	"github.com/kvferry/kvferry/kv"
)

// Have is what P computed of one request: logical blocks from token 0 on.
type Have struct {
	Blocks    []kv.BlockID
	NumTokens int // prompt tokens whose KV is in Blocks
}

// Want is where D wants it.
type Want struct {
	Blocks []kv.BlockID // logical
	// Positioned says that StartToken and NumTokens are told. A stock registration has neither:
	// its last block is that of the prompt's last token.
	Positioned bool
	StartToken int // absolute position of the first token of Blocks
	NumTokens  int // tokens wanted from there on
}

// Plan is one WRITE from P's prepared list into D's, or one READ of D from P's: index i of Local is
// paired with index i of Remote.
type Plan struct {
	Local  []uint32
	Remote []uint32
	Blocks int   // kernel blocks
	Bytes  int64 // in all regions
}

// PlanWrite pairs P's blocks with D's by absolute token position. The layouts must have passed
// Check. An empty Want gives an empty plan. Typed errors: *PairError, *RangeError.
func PlanWrite(local, remote Layout, have Have, want Want) (Plan, error) {
	from, to, err := pair(local, remote, have, want)
	if err != nil {
		return Plan{}, err
	}
	return plan(local, from, remote, to), nil
}

// PlanRead pairs D's blocks with P's by the same rule; local is D's layout, remote P's. Of a stock P
// that computed past the prompt, have counts the prompt's tokens only: blocks behind them are never
// paired (nixl-connector.md, H4). Typed errors: *PairError, *RangeError.
func PlanRead(local, remote Layout, want Want, have Have) (Plan, error) {
	from, to, err := pair(remote, local, have, want)
	if err != nil {
		return Plan{}, err
	}
	return plan(local, to, remote, from), nil
}

func plan(local Layout, mine []kv.KernelBlockID, remote Layout, theirs []kv.KernelBlockID) Plan {
	return Plan{
		Local:  local.indices(mine),
		Remote: remote.indices(theirs),
		Blocks: len(mine),
		Bytes:  int64(len(mine)) * local.Bytes(),
	}
}

// pair gives the kernel blocks to move, in token order: from of P's, to of D's.
func pair(p, d Layout, have Have, want Want) (from, to []kv.KernelBlockID, err error) {
	if from, err = p.Kernel(have.Blocks, Prefill); err != nil {
		return nil, nil, err
	}
	if to, err = d.Kernel(want.Blocks, Decode); err != nil {
		return nil, nil, err
	}
	first, n, err := span(d, have, want)
	if err != nil {
		return nil, nil, err
	}
	// Of the last logical blocks on either side only the kernel blocks that hold tokens are moved.
	if needed := ceilDiv(have.NumTokens, p.BlockSize); needed > len(from) {
		return nil, nil, pairError("the prefill engine has %d kernel blocks for %d tokens of %d per block", len(from), have.NumTokens, p.BlockSize)
	}
	if first+n > len(from) || n > len(to) {
		return nil, nil, pairError("kernel blocks %d to %d are wanted into %d, the prefill engine has %d", first, first+n, len(to), len(from))
	}
	return from[first : first+n], to[:n], nil
}

// span is which kernel blocks of the prompt D wants: the first one's position and their number.
func span(remote Layout, have Have, want Want) (first, n int, err error) {
	tokens, per := have.NumTokens, remote.LogicalTokens()
	if tokens < 0 {
		return 0, 0, pairError("the prefill engine has %d tokens", tokens)
	}
	if len(want.Blocks) == 0 && (!want.Positioned || want.NumTokens == 0) {
		return 0, 0, nil
	}
	start := want.StartToken
	if !want.Positioned {
		all := ceilDiv(tokens, per)
		if len(want.Blocks) > all {
			return 0, 0, pairError("%d blocks are wanted, the prompt of %d tokens has %d of them", len(want.Blocks), tokens, all)
		}
		start = (all - len(want.Blocks)) * per
	} else {
		switch end := want.StartToken + want.NumTokens; {
		case want.StartToken < 0 || want.NumTokens < 1:
			return 0, 0, pairError("%d tokens from token %d on are wanted", want.NumTokens, want.StartToken)
		case end != tokens:
			return 0, 0, pairError("tokens up to %d are wanted, the prefill engine has %d", end, tokens)
		case want.StartToken%per != 0:
			return 0, 0, pairError("the wanted blocks begin at token %d, which is inside a block of %d", want.StartToken, per)
		case ceilDiv(want.NumTokens, per) != len(want.Blocks):
			return 0, 0, pairError("%d tokens are wanted into %d blocks of %d", want.NumTokens, len(want.Blocks), per)
		}
	}
	first = start / remote.BlockSize
	return first, ceilDiv(tokens, remote.BlockSize) - first, nil
}

func pairError(format string, args ...any) error {
	return &PairError{fmt.Sprintf(format, args...)}
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
