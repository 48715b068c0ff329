package kv

import "fmt"

// Region is one run of equally spaced kernel blocks in one engine rank's memory: block b lies at
// Base + b*Stride and is BlockLen bytes long. An attention layer is one region; K and V of a block
// lie inside it and move as one unit.
type Region struct {
	Base      uint64 // virtual address in the owner's process
	BlockLen  uint64 // bytes moved per kernel block
	Stride    uint64 // bytes between the starts of consecutive blocks, >= BlockLen
	NumBlocks int    // kernel blocks
	Group     int    // KV-cache group; -1 = shared by several groups
	Name      string // first layer name that lives here
	Device    uint32 // device index used in descriptors
}

// Validate reports a region that cannot be addressed.
func (r Region) Validate() error {
	switch {
	case r.Base == 0:
		return fmt.Errorf("region %q has no base address", r.Name)
	case r.BlockLen == 0:
		return fmt.Errorf("region %q has blocks of 0 bytes", r.Name)
	case r.Stride < r.BlockLen:
		return fmt.Errorf("region %q has stride %d below its block length %d", r.Name, r.Stride, r.BlockLen)
	case r.NumBlocks <= 0:
		return fmt.Errorf("region %q has %d blocks", r.Name, r.NumBlocks)
	}
	const maxAddr = 1 << 63
	if n := uint64(r.NumBlocks); r.Stride >= maxAddr/n || r.Base >= maxAddr-n*r.Stride {
		return fmt.Errorf("region %q does not fit the address space", r.Name)
	}
	return nil
}

// Descriptor names Length bytes at Addr on a device of one rank.
type Descriptor struct {
	Addr   uint64
	Length uint64
	Device uint32
}
