package model

import (
	"bytes"
	"strings"
	"testing"
	"unsafe"
)

// Block, HeadToken, LayerBytes and Regions describe the same bytes.
func TestCacheAddresses(t *testing.T) {
	cfg := small(t, false).cfg
	for _, layout := range []Layout{LBHNC, LBNHC} {
		c := newCache(t, cfg, CacheShape{Layout: layout, BlockSize: 4, NumBlocks: 3})
		seen := map[*byte]bool{}
		regions := c.Regions()
		for l := range cfg.Layers {
			off, length := c.LayerBytes(l)
			base := uint64(uintptr(unsafe.Pointer(&c.mem[0])))
			g := regions[l]
			if g.Base != base+uint64(off) || g.Stride*uint64(g.NumBlocks) != uint64(length) || g.Validate() != nil {
				t.Errorf("layer %d: region %+v, bytes %d+%d", l, g, off, length)
			}
			for b := range c.shape.NumBlocks {
				block := c.Block(l, table(b, 1)[0])
				if &block[0] != &c.mem[off+b*int(g.Stride)] || len(block) != int(g.BlockLen) || cap(block) != len(block) {
					t.Errorf("layer %d block %d lies elsewhere", l, b)
				}
				for h := range cfg.KVHeads {
					for n := range 4 {
						content := c.HeadToken(l, table(b, 1)[0], h, n)
						if len(content) != 2*4*cfg.HeadDim || seen[&content[0]] {
							t.Errorf("content of layer %d block %d head %d token %d overlaps", l, b, h, n)
						}
						seen[&content[0]] = true
						want := n*cfg.KVHeads + h
						if layout == LBHNC {
							want = h*4 + n
						}
						if &content[0] != &block[want*len(content)] {
							t.Errorf("%v: head %d token %d is not number %d of its block", layout, h, n, want)
						}
					}
				}
			}
		}
		if len(seen)*8*cfg.HeadDim != len(c.mem) {
			t.Errorf("contents cover %d of %d bytes", len(seen)*8*cfg.HeadDim, len(c.mem))
		}
	}
}

// Both layouts hold the same contents.
func TestLayoutsHoldTheSame(t *testing.T) {
	m := small(t, false)
	a := newCache(t, m.cfg, CacheShape{Layout: LBHNC, BlockSize: 4, NumBlocks: 5})
	b := newCache(t, m.cfg, CacheShape{Layout: LBNHC, BlockSize: 4, NumBlocks: 5})
	prompt, r := m.tok.Encode(text(1, 19)), NewRunner(m, 1)
	run(t, r, a, prompt, 0, table(0, 5))
	run(t, r, b, prompt, 0, table(0, 5))
	for l := range m.cfg.Layers {
		for p := range prompt {
			for h := range m.cfg.KVHeads {
				id := table(0, 5)[p/4]
				if !bytes.Equal(a.HeadToken(l, id, h, p%4), b.HeadToken(l, id, h, p%4)) {
					t.Fatalf("layer %d position %d head %d differs", l, p, h)
				}
			}
		}
	}
}

func TestCacheRefuses(t *testing.T) {
	cfg := small(t, false).cfg
	mem := make([]byte, CacheBytes(cfg, 4, 3)+8)
	for want, c := range map[string]struct {
		shape CacheShape
		mem   []byte
	}{
		"block size is 0":      {CacheShape{BlockSize: 0, NumBlocks: 3}, mem},
		"block size is -1":     {CacheShape{BlockSize: -1, NumBlocks: 3}, mem},
		"block size is 4097":   {CacheShape{BlockSize: MaxBlockSize + 1, NumBlocks: 3}, mem},
		"0 blocks asked for":   {CacheShape{BlockSize: 4}, mem},
		"4 blocks asked for":   {CacheShape{BlockSize: 4, NumBlocks: 4}, mem},
		"9223372036854775807 ": {CacheShape{BlockSize: 4, NumBlocks: 1<<63 - 1}, mem},
		"layout Layout(7)":     {CacheShape{BlockSize: 4, NumBlocks: 3, Layout: 7}, mem},
		"keys Keys(7)":         {CacheShape{BlockSize: 4, NumBlocks: 3, Keys: 7}, mem},
		"not aligned":          {CacheShape{BlockSize: 4, NumBlocks: 3}, mem[1:]},
		"1 blocks asked for":   {CacheShape{BlockSize: 4, NumBlocks: 1}, nil},
	} {
		if _, err := NewCache(cfg, c.shape, c.mem); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error is %v, want one with %q", err, want)
		}
	}
	if _, err := NewCache(Config{}, CacheShape{BlockSize: 4, NumBlocks: 1}, mem); err == nil {
		t.Error("cache of no model accepted")
	}
}

func TestNames(t *testing.T) {
	for _, l := range []Layout{LBHNC, LBNHC} {
		if got, err := ParseLayout(l.String()); err != nil || got != l {
			t.Errorf("%v: %v %v", l, got, err)
		}
	}
	for _, k := range []Keys{PlainKeys, RotatedKeys} {
		if got, err := ParseKeys(k.String()); err != nil || got != k {
			t.Errorf("%v: %v %v", k, got, err)
		}
	}
	if _, err := ParseLayout("HND"); err == nil {
		t.Error("unknown layout accepted")
	}
	if _, err := ParseKeys(""); err == nil {
		t.Error("unknown keys accepted")
	}
}
