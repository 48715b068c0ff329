package engine

import (
	"sync"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	tiercore "github.com/kvferry/kvferry/tier/core"
)

// copyTask is a copy between KV blocks and slots of the CPU tier, both pinned by who asks until done.
type copyTask struct {
	load   bool // into the blocks; else out of them
	blocks []kv.BlockID
	slots  []tiercore.Slot
	done   func()
}

// copier copies on a goroutine of its own: loads first, as requests wait for them, each in order. What
// waits is bounded by the KV cache: a block is in one load at most, and in the stores of those
// requests that hold it.
type copier struct {
	m     *tier.Manager
	cache *model.Cache
	ended chan struct{}
	wake  *sync.Cond // on mu
	mu    struct {
		sync.Mutex
		loads, stores []copyTask
		closed        bool
	}
}

func newCopier(m *tier.Manager, cache *model.Cache) *copier {
	c := &copier{m: m, cache: cache, ended: make(chan struct{})}
	c.wake = sync.NewCond(&c.mu)
	go c.run()
	return c
}

func (c *copier) put(t copyTask) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.load {
		c.mu.loads = append(c.mu.loads, t)
	} else {
		c.mu.stores = append(c.mu.stores, t)
	}
	c.wake.Signal()
}

func (c *copier) run() {
	defer close(c.ended)
	for {
		t, ok := c.next()
		if !ok {
			return
		}
		layers, length := c.cache.Layers(), c.cache.BlockLen()
		for i, slot := range t.slots {
			kept := c.m.Block(slot)
			for l := range layers {
				block, part := c.cache.Block(l, t.blocks[i]), kept[l*length:][:length]
				if t.load {
					copy(block, part)
				} else {
					copy(part, block)
				}
			}
		}
		t.done()
	}
}

func (c *copier) next() (t copyTask, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.mu.loads)+len(c.mu.stores) == 0 {
		if c.mu.closed {
			return t, false
		}
		c.wake.Wait()
	}
	from := &c.mu.loads
	if len(*from) == 0 {
		from = &c.mu.stores
	}
	t = (*from)[0]
	(*from)[0] = copyTask{}
	*from = (*from)[1:]
	return t, true
}

// close lets what waits be copied and ends the goroutine.
func (c *copier) close() {
	c.mu.Lock()
	c.mu.closed = true
	c.wake.Signal()
	c.mu.Unlock()
	<-c.ended
}
