package model

import (
	"fmt"
	"unsafe"

	"github.com/kvferry/kvferry/kv"
)

// Layout is the order of dimensions in the cache memory, outermost first: L layer, B block,
// H KV head, N token in block, C content. The content of one head and token is K then V, HeadDim
// float32 each in the machine's byte order.
type Layout uint8

const (
	// LBHNC keeps each head of a block contiguous, so that heads can move alone.
	LBHNC Layout = iota
	// LBNHC keeps each token of a block contiguous.
	LBNHC
)

func (l Layout) String() string {
	switch l {
	case LBHNC:
		return "LBHNC"
	case LBNHC:
		return "LBNHC"
	}
	return fmt.Sprintf("Layout(%d)", uint8(l))
}

// ParseLayout is the inverse of String.
func ParseLayout(s string) (Layout, error) {
	for _, l := range []Layout{LBHNC, LBNHC} {
		if s == l.String() {
			return l, nil
		}
	}
	return 0, fmt.Errorf("cache layout %q is unknown, use LBHNC or LBNHC", s)
}

// Keys says in which form the cache keeps keys. Both give the same logits to the bit.
type Keys uint8

const (
	// PlainKeys are kept as projected and rotated when they are read, to the position that the
	// block table gives them. A block at the wrong place of the table therefore changes the output.
	PlainKeys Keys = iota
	// RotatedKeys carry the position that they were computed for, as stock engines keep them.
	// Attention is a sum over positions, so two full blocks may then be exchanged in the table
	// without any effect on the output: tokens cannot prove that blocks arrived in order.
	RotatedKeys
)

func (k Keys) String() string {
	switch k {
	case PlainKeys:
		return "plain"
	case RotatedKeys:
		return "rotated"
	}
	return fmt.Sprintf("Keys(%d)", uint8(k))
}

// ParseKeys is the inverse of String.
func ParseKeys(s string) (Keys, error) {
	for _, k := range []Keys{PlainKeys, RotatedKeys} {
		if s == k.String() {
			return k, nil
		}
	}
	return 0, fmt.Errorf("cache keys %q are unknown, use plain or rotated", s)
}

// CacheShape is how a cache is laid out. Two engines can exchange blocks only if they agree on
// Keys.
type CacheShape struct {
	Layout    Layout
	Keys      Keys
	BlockSize int // tokens
	NumBlocks int // in each layer
}

const elemBytes = 4 // float32

// BlockLen is the number of bytes of one block in one layer.
func BlockLen(cfg Config, blockSize int) int {
	return cfg.KVHeads * blockSize * cfg.contentDim() * elemBytes
}

// CacheBytes is the memory that a cache of numBlocks blocks needs: one region per layer, regions
// one after the other without gaps, and so are the blocks of a region.
func CacheBytes(cfg Config, blockSize, numBlocks int) int {
	return cfg.Layers * numBlocks * BlockLen(cfg, blockSize)
}

// Cache is a paged KV cache in memory that others own. It holds no state besides the memory: a
// block's contents are whatever was last written there, by Forward or by a transfer.
//
// One goroutine at a time may run Forward on it. Transfers may write other blocks meanwhile; who
// may write which block when is the concern of the block pool's owner.
type Cache struct {
	cfg   Config
	shape CacheShape
	mem   []byte
	data  []float32 // the same memory

	// In elements.
	layerStep, blockStep, headStep, tokenStep int
}

// NewCache lays a cache over mem, which must be aligned to 4 bytes, at least CacheBytes long and
// stay mapped while the Cache is in use. The memory is not cleared.
func NewCache(cfg Config, shape CacheShape, mem []byte) (*Cache, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if shape.BlockSize < 1 || shape.BlockSize > MaxBlockSize {
		return nil, fmt.Errorf("kv cache: block size is %d tokens, must be 1 to %d", shape.BlockSize, MaxBlockSize)
	}
	if shape.Keys > RotatedKeys {
		return nil, fmt.Errorf("kv cache: form of keys %v is unknown", shape.Keys)
	}
	c := &Cache{cfg: cfg, shape: shape}
	content := cfg.contentDim()
	switch shape.Layout {
	case LBHNC:
		c.headStep, c.tokenStep = shape.BlockSize*content, content
	case LBNHC:
		c.headStep, c.tokenStep = content, cfg.KVHeads*content
	default:
		return nil, fmt.Errorf("kv cache: layout %v is unknown", shape.Layout)
	}
	blockLen := BlockLen(cfg, shape.BlockSize)
	if most := len(mem) / cfg.Layers / blockLen; shape.NumBlocks < 1 || shape.NumBlocks > most {
		return nil, fmt.Errorf("kv cache: %d blocks asked for, memory of %d bytes holds 1 to %d of %d layers x %d bytes",
			shape.NumBlocks, len(mem), most, cfg.Layers, blockLen)
	}
	c.mem = mem[:CacheBytes(cfg, shape.BlockSize, shape.NumBlocks)]
	base := unsafe.Pointer(unsafe.SliceData(mem))
	if uintptr(base)%elemBytes != 0 {
		return nil, fmt.Errorf("kv cache: memory is not aligned to %d bytes", elemBytes)
	}
	c.data = unsafe.Slice((*float32)(base), len(c.mem)/elemBytes)
	c.blockStep = blockLen / elemBytes
	c.layerStep = shape.NumBlocks * c.blockStep
	return c, nil
}

// Shape is how the cache is laid out.
func (c *Cache) Shape() CacheShape { return c.shape }

// BlockLen is the number of bytes of one block in one layer; it is also the distance between
// consecutive blocks.
func (c *Cache) BlockLen() int { return BlockLen(c.cfg, c.shape.BlockSize) }

// LayerBytes is where a layer's region lies in the memory: offset and length in bytes.
func (c *Cache) LayerBytes(layer int) (offset, length int) {
	length = c.shape.NumBlocks * c.BlockLen()
	return layer * length, length
}

// Regions describes the memory for memory registration, one region per layer, named as stock
// engines name a Llama's attention layers. Addresses are of this process. A kernel block is a
// logical block here (ratio 1).
func (c *Cache) Regions() []kv.Region {
	base := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(c.mem))))
	out := make([]kv.Region, c.cfg.Layers)
	for i := range out {
		off, _ := c.LayerBytes(i)
		out[i] = kv.Region{
			Base:      base + uint64(off),
			BlockLen:  uint64(c.BlockLen()),
			Stride:    uint64(c.BlockLen()),
			NumBlocks: c.shape.NumBlocks,
			Name:      fmt.Sprintf("model.layers.%d.self_attn.attn", i),
		}
	}
	return out
}

// Block is the memory of one block in one layer. Layer and id must exist.
func (c *Cache) Block(layer int, id kv.BlockID) []byte {
	off, length := c.LayerBytes(layer)
	n := c.BlockLen()
	region := c.mem[off : off+length]
	return region[int(id)*n:][:n:n]
}

// HeadToken is the content of one head and token of a block: K then V, HeadDim*4 bytes each. All
// indices must exist.
func (c *Cache) HeadToken(layer int, id kv.BlockID, head, token int) []byte {
	b := c.Block(layer, id)
	n := c.cfg.contentDim() * elemBytes
	return b[(head*c.headStep+token*c.tokenStep)*elemBytes:][:n:n]
}

// row is the offset in data of the content of a position's first head.
func (c *Cache) row(layer int, blocks []kv.BlockID, position int) int {
	return layer*c.layerStep + int(blocks[position/c.shape.BlockSize])*c.blockStep + position%c.shape.BlockSize*c.tokenStep
}

// Layers is the number of layers.
func (c *Cache) Layers() int { return c.cfg.Layers }
