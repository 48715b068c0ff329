package geometry

import "fmt"

// MismatchError is a peer whose memory is shaped so that nothing can be moved between it and ours.
type MismatchError struct {
	What   string // "block size", "block length of region 3 (model.layers.3)", …
	Local  string
	Remote string
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("the peer's %s is %s, ours is %s; the two engines must agree", e.What, e.Remote, e.Local)
}

// RangeError is a block id that lies beyond a region.
type RangeError struct {
	Side   Side
	Block  uint64 // kernel block
	Region int
	Blocks int // of the region
}

func (e *RangeError) Error() string {
	return fmt.Sprintf("kernel block %d of %s is beyond region %d, which has %d blocks", e.Block, e.Side, e.Region, e.Blocks)
}

// PairError is a pair of block lists that cannot belong to one prompt.
type PairError struct {
	Reason string
}

func (e *PairError) Error() string { return "the block lists do not fit: " + e.Reason }

// LayoutError is a layout that this package cannot work with at all.
type LayoutError struct {
	Reason string
}

func (e *LayoutError) Error() string { return "unsupported memory layout: " + e.Reason }

// Side says whose blocks an error is about.
type Side string

const (
	Prefill Side = "the prefill engine"
	Decode  Side = "the decode engine"
)
