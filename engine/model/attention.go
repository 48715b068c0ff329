package model

import (
	"math"

	"github.com/kvferry/kvferry/kv"
)

// attnChunk is the number of consecutive queries of one sequence and KV head that one task
// computes. A task copies the keys and values it needs out of the pages once; at 64 queries that
// costs 1/64 of the task or less.
const attnChunk = 64

// attnPanel is the number of queries whose scores are kept at a time: 64 KiB at 2048 positions.
const attnPanel = 8

// directQueries is the number of queries below which copying out of the pages costs more than it
// saves. Both ways add the same products in the same order.
const directQueries = 3

// attnTask is the attention of some new tokens of one sequence in one KV head of one layer.
type attnTask struct {
	blocks   []kv.BlockID
	head     int // KV head
	row      int // of the first query in the activations
	position int // of the first query
	count    int // queries
}

// attnScratch belongs to one thread of one Runner.
type attnScratch struct {
	keys   []float32 // [position][headDim]
	values []float32 // [headDim][position]
	scores []float32 // [attnPanel][position]
}

func grow(s []float32, n int) []float32 {
	if cap(s) < n {
		return make([]float32, n, n+n/4)
	}
	return s[:n]
}

// attend computes task t: q holds the rotated queries [row][heads*headDim], out gets the result
// in the same shape.
func (s *attnScratch) attend(m *Model, c *Cache, layer int, t attnTask, q, out []float32) {
	if t.count < directQueries {
		for i := range t.count {
			s.attendDirect(m, c, layer, t, i, q, out)
		}
		return
	}
	length := t.position + t.count
	s.gather(m, c, layer, t, length)
	cfg := &m.cfg
	hd, group, width := cfg.HeadDim, cfg.Group(), cfg.Heads*cfg.HeadDim
	s.scores = grow(s.scores, attnPanel*length)
	scale := float32(1 / math.Sqrt(float64(hd)))
	for h := t.head * group; h < (t.head+1)*group; h++ {
		for first := 0; first < t.count; first += attnPanel {
			rows := min(attnPanel, t.count-first)
			seen := t.position + first + 1 // positions that the panel's first query sees
			at := (t.row+first)*width + h*hd
			mulT(s.scores, length, q[at:], width, rows, s.keys, hd, seen+rows-1, hd)
			var total [attnPanel]float32
			for r := range rows {
				total[r] = softmax(s.scores[r*length:][:seen+r], scale)
			}
			for d := 0; d < hd; {
				n := dotWidth(hd - d)
				for r := range rows {
					dotN(n, out[at+r*width+d:], s.scores[r*length:][:seen+r], s.values[d*length:], length)
				}
				d += n
			}
			for r := range rows {
				divide(out[at+r*width:][:hd], total[r])
			}
		}
	}
}

// gather copies keys, rotated, and values, transposed, of positions 0 to length-1.
func (s *attnScratch) gather(m *Model, c *Cache, layer int, t attnTask, length int) {
	hd := m.cfg.HeadDim
	s.keys, s.values = grow(s.keys, length*hd), grow(s.values, length*hd)
	for start := 0; start < length; start += c.shape.BlockSize {
		n := min(c.shape.BlockSize, length-start)
		page := c.data[c.row(layer, t.blocks, start)+t.head*c.headStep:]
		s.copyKeys(m, c, s.keys[start*hd:], page, start, n)
		for d := range hd {
			dst := s.values[d*length+start:][:n]
			for i := range dst {
				dst[i] = page[i*c.tokenStep+hd+d]
			}
		}
	}
}

// copyKeys copies the keys of n positions of a page, the first one at start, and rotates those that
// the cache keeps plain.
func (s *attnScratch) copyKeys(m *Model, c *Cache, dst, page []float32, start, n int) {
	hd := m.cfg.HeadDim
	for i := range n {
		key := dst[i*hd:][:hd]
		copy(key, page[i*c.tokenStep:])
		if c.shape.Keys == PlainKeys {
			m.rope.rotate(key, start+i)
		}
	}
}

// attendDirect computes query i of the task, page by page.
func (s *attnScratch) attendDirect(m *Model, c *Cache, layer int, t attnTask, i int, q, out []float32) {
	hd, group, size := m.cfg.HeadDim, m.cfg.Group(), c.shape.BlockSize
	seen := t.position + i + 1
	s.scores, s.keys = grow(s.scores, group*seen), grow(s.keys, size*hd)
	scale := float32(1 / math.Sqrt(float64(hd)))
	at := ((t.row+i)*m.cfg.Heads + t.head*group) * hd // the heads of a group lie side by side
	for start := 0; start < seen; start += size {
		n := min(size, seen-start)
		keys, step := c.data[c.row(layer, t.blocks, start)+t.head*c.headStep:], c.tokenStep
		if c.shape.Keys == PlainKeys {
			s.copyKeys(m, c, s.keys, keys, start, n)
			keys, step = s.keys, hd
		}
		mulT(s.scores[start:], seen, q[at:], hd, group, keys, step, n, hd)
	}
	for h := range group {
		scores, y := s.scores[h*seen:][:seen], out[at+h*hd:][:hd]
		total := softmax(scores, scale)
		clear(y)
		for start := 0; start < seen; start += size {
			page := c.data[c.row(layer, t.blocks, start)+t.head*c.headStep:]
			weigh(y, scores[start:min(start+size, seen)], page[hd:], c.tokenStep)
		}
		divide(y, total)
	}
}

// weigh adds p[j] * v[j] to y for each j in turn; vStep is the distance between rows of v. Four rows
// at a time spare loads and stores of y, not an addition.
func weigh(y, p, v []float32, vStep int) {
	n := len(y)
	for ; len(p) >= 4; p = p[4:] {
		p0, p1, p2, p3 := p[0], p[1], p[2], p[3]
		v0, v1, v2, v3 := v[:n], v[vStep:][:n], v[2*vStep:][:n], v[3*vStep:][:n]
		for d, s := range y {
			s += float32(p0 * v0[d])
			s += float32(p1 * v1[d])
			s += float32(p2 * v2[d])
			s += float32(p3 * v3[d])
			y[d] = s
		}
		if len(p) == 4 {
			return
		}
		v = v[4*vStep:]
	}
	for j, q := range p {
		for d, x := range v[j*vStep:][:n] {
			y[d] += float32(q * x)
		}
	}
}

// softmax replaces scores by their unnormalised weights and returns the sum of these.
func softmax(s []float32, scale float32) float32 {
	top := float32(math.Inf(-1))
	for i, v := range s {
		v *= scale
		s[i] = v
		if v > top {
			top = v
		}
	}
	return expShifted(s, top)
}

func divide(x []float32, by float32) {
	for i := range x {
		x[i] /= by
	}
}
