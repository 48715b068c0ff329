package engine

// KVFault is a way to damage received KV.
type KVFault string

const (
	SwapBlocks KVFault = "swap-blocks" // the first two received blocks change places
	ZeroLayer  KVFault = "zero-layer"  // one layer of all received blocks is zero
	ZeroHead   KVFault = "zero-head"   // one KV head of one layer of all received blocks is zero
	StaleBlock KVFault = "stale-block" // the second received block holds what the first does
)

// KVFaults is every known fault.
var KVFaults = []KVFault{SwapBlocks, ZeroLayer, ZeroHead, StaleBlock}
