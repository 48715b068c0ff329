package model

import (
	"fmt"
	"math"

	"github.com/kvferry/kvferry/kv"
)

// Sequence is the part of one request that a Forward call computes.
type Sequence struct {
	Tokens []kv.Token   // new tokens, at least one
	Start  int          // position of the first one; the KV of all positions before is in Blocks
	Blocks []kv.BlockID // block table: position p lies in Blocks[p/blockSize]
	// Logits asks for the logits behind the last new token. Chunks of a prompt other than its
	// last have no use for them.
	Logits bool
	// Adapter changes the model for this sequence; nil for the model itself.
	Adapter *Adapter
}

// Logits receives the result of Forward. It is reused from call to call and belongs to the
// caller's goroutine.
type Logits struct {
	vocab int
	data  []float32
	index []int // per sequence: row in data, or -1
}

// Row is the logits of sequence i of the last call, one per token of the vocabulary, valid until
// the next one; nil if the sequence did not ask.
func (l *Logits) Row(i int) []float32 {
	if l.index[i] < 0 {
		return nil
	}
	return l.data[l.index[i]*l.vocab:][:l.vocab:l.vocab]
}

// SequenceError says which sequence of a call cannot be computed. Nothing was written.
type SequenceError struct {
	Index  int // in the call
	Reason string
}

func (e *SequenceError) Error() string {
	return fmt.Sprintf("forward: sequence %d: %s", e.Index, e.Reason)
}

// Forward computes K and V of all new tokens, writes them to the cache, lets every new token
// attend to all positions up to its own, and gives the logits that were asked for. Prefill chunks
// and decode steps of many sequences go in one call. Within a layer all writes come before all
// reads, so a sequence may read blocks that another one of the same call fills.
//
// The result of a sequence, logits and cache contents, is the same to the bit whatever else is in
// the call, however its prompt was cut into chunks, in every layout and block size, and with any
// number of threads.
//
// An error leaves cache and out unchanged.
func (r *Runner) Forward(c *Cache, seqs []Sequence, out *Logits) error {
	if err := r.prepare(c, seqs); err != nil {
		return err
	}
	cfg, w := &r.model.cfg, &r.model.weights
	n := len(r.rows)
	i := 0
	for _, s := range seqs {
		for _, t := range s.Tokens {
			copy(r.x[i*cfg.Hidden:][:cfg.Hidden], w.Embed[int(t)*cfg.Hidden:])
			i++
		}
	}
	for l := range w.Layers {
		r.attention(c, l, seqs, n)
		r.feedForward(&w.Layers[l], n)
	}
	r.logits(seqs, out)
	return nil
}

// prepare checks the call and lays out its rows and attention tasks.
func (r *Runner) prepare(c *Cache, seqs []Sequence) error {
	cfg := &r.model.cfg
	if c.cfg.Layers != cfg.Layers || c.cfg.KVHeads != cfg.KVHeads || c.cfg.HeadDim != cfg.HeadDim {
		return fmt.Errorf("forward: the cache was laid out for another model")
	}
	if len(seqs) > MaxBatchSeqs {
		return fmt.Errorf("forward: %d sequences in one call, at most %d", len(seqs), MaxBatchSeqs)
	}
	r.rows, r.tasks = r.rows[:0], r.tasks[:0]
	clear(r.writers)
	for i, s := range seqs {
		if reason := r.check(c, i, s); reason != "" {
			return &SequenceError{Index: i, Reason: reason}
		}
		for head := range cfg.KVHeads {
			for j := 0; j < len(s.Tokens); j += attnChunk {
				r.tasks = append(r.tasks, attnTask{blocks: s.Blocks, head: head, row: len(r.rows) + j,
					position: s.Start + j, count: min(attnChunk, len(s.Tokens)-j)})
			}
		}
		for j := range s.Tokens {
			r.rows = append(r.rows, row{seq: i, position: s.Start + j})
		}
		if len(r.rows) > MaxBatchTokens {
			return fmt.Errorf("forward: more than %d new tokens in one call", MaxBatchTokens)
		}
	}
	n := len(r.rows)
	r.x, r.norm, r.out = grow(r.x, n*cfg.Hidden), grow(r.norm, n*cfg.Hidden), grow(r.out, n*cfg.Hidden)
	r.q, r.mixed = grow(r.q, n*cfg.Heads*cfg.HeadDim), grow(r.mixed, n*cfg.Heads*cfg.HeadDim)
	r.k, r.v = grow(r.k, n*cfg.KVHeads*cfg.HeadDim), grow(r.v, n*cfg.KVHeads*cfg.HeadDim)
	r.gate, r.up = grow(r.gate, n*cfg.FFN), grow(r.up, n*cfg.FFN)
	return nil
}

// check says why a sequence cannot be computed, or nothing.
func (r *Runner) check(c *Cache, index int, s Sequence) string {
	cfg := &r.model.cfg
	end := s.Start + len(s.Tokens)
	switch {
	case len(s.Tokens) == 0:
		return "has no new token"
	case s.Start < 0 || s.Start > cfg.MaxPosition || end > cfg.MaxPosition:
		return fmt.Sprintf("positions %d to %d exceed the context of %d", s.Start, end-1, cfg.MaxPosition)
	case len(s.Blocks)*c.shape.BlockSize < end:
		return fmt.Sprintf("%d blocks of %d tokens do not hold position %d", len(s.Blocks), c.shape.BlockSize, end-1)
	}
	if s.Adapter != nil {
		if reason := s.Adapter.fits(cfg); reason != "" {
			return reason
		}
	}
	for _, t := range s.Tokens {
		if t < 0 || int(t) >= cfg.Vocab {
			return fmt.Sprintf("token %d is not in a vocabulary of %d", t, cfg.Vocab)
		}
	}
	for i, b := range s.Blocks {
		if i*c.shape.BlockSize >= end {
			break
		}
		if uint64(b) >= uint64(c.shape.NumBlocks) {
			return fmt.Sprintf("block %d does not exist, the cache has %d", b, c.shape.NumBlocks)
		}
	}
	// A block has one writer, and that one only once: anything else is a fault of the block pool
	// that would give wrong tokens without a trace.
	for i := s.Start / c.shape.BlockSize; i <= (end-1)/c.shape.BlockSize; i++ {
		b := uint32(s.Blocks[i])
		if other, taken := r.writers[b]; taken {
			return fmt.Sprintf("block %d is already written by sequence %d of this call", b, other)
		}
		r.writers[b] = index
	}
	return ""
}

// attention adds the attention sublayer of layer l to the residual stream of n rows.
func (r *Runner) attention(c *Cache, l int, seqs []Sequence, n int) {
	cfg, w := &r.model.cfg, &r.model.weights.Layers[l]
	qDim, kvDim, hd := cfg.Heads*cfg.HeadDim, cfg.KVHeads*cfg.HeadDim, cfg.HeadDim
	r.normalise(w.AttnNorm, n)
	r.project(r.q, r.norm, w.Q, n, qDim, cfg.Hidden)
	r.project(r.k, r.norm, w.K, n, kvDim, cfg.Hidden)
	r.project(r.v, r.norm, w.V, n, kvDim, cfg.Hidden)
	for i, row := range r.rows {
		q, k, v := r.q[i*qDim:][:qDim], r.k[i*kvDim:][:kvDim], r.v[i*kvDim:][:kvDim]
		if a := seqs[row.seq].Adapter; a != nil {
			a.add(l, v, r.norm[i*cfg.Hidden:][:cfg.Hidden])
		}
		r.model.rope.rotate(q, row.position)
		if c.shape.Keys == RotatedKeys {
			r.model.rope.rotate(k, row.position)
		}
		at := c.row(l, seqs[row.seq].Blocks, row.position)
		for h := range cfg.KVHeads {
			content := c.data[at+h*c.headStep:][:2*hd]
			copy(content, k[h*hd:][:hd])
			copy(content[hd:], v[h*hd:][:hd])
		}
	}
	work := 0
	for _, t := range r.tasks {
		work += t.count * (t.position + t.count) * 2 * hd * cfg.Group()
	}
	r.each(len(r.tasks), work, func(thread, i int) {
		r.attn[thread].attend(r.model, c, l, r.tasks[i], r.q, r.mixed)
	})
	r.project(r.out, r.mixed, w.O, n, cfg.Hidden, qDim)
	addTo(r.x[:n*cfg.Hidden], r.out)
}

// feedForward adds the SwiGLU sublayer to the residual stream of n rows.
func (r *Runner) feedForward(w *LayerWeights, n int) {
	cfg := &r.model.cfg
	r.normalise(w.FFNNorm, n)
	r.project(r.gate, r.norm, w.Gate, n, cfg.FFN, cfg.Hidden)
	r.project(r.up, r.norm, w.Up, n, cfg.FFN, cfg.Hidden)
	for i, g := range r.gate {
		r.gate[i] = silu(g) * r.up[i]
	}
	r.project(r.out, r.gate, w.Down, n, cfg.Hidden, cfg.FFN)
	addTo(r.x[:n*cfg.Hidden], r.out)
}

// logits fills out from the residual stream.
func (r *Runner) logits(seqs []Sequence, out *Logits) {
	cfg := &r.model.cfg
	out.vocab, out.index = cfg.Vocab, out.index[:0]
	wanted, end := 0, 0
	for _, s := range seqs {
		end += len(s.Tokens)
		if !s.Logits {
			out.index = append(out.index, -1)
			continue
		}
		rmsNorm(r.norm[wanted*cfg.Hidden:][:cfg.Hidden], r.x[(end-1)*cfg.Hidden:], r.model.weights.Norm, cfg.NormEps)
		out.index = append(out.index, wanted)
		wanted++
	}
	out.data = grow(out.data, wanted*cfg.Vocab)
	if wanted > 0 {
		r.project(out.data, r.norm, r.model.head(), wanted, cfg.Vocab, cfg.Hidden)
	}
}

func (r *Runner) normalise(weight []float32, n int) {
	cfg := &r.model.cfg
	for i := range n {
		rmsNorm(r.norm[i*cfg.Hidden:][:cfg.Hidden], r.x[i*cfg.Hidden:], weight, cfg.NormEps)
	}
}

// rmsNorm sets dst to x scaled to a root mean square of 1, times weight.
func rmsNorm(dst, x, weight []float32, eps float64) {
	x, weight = x[:len(dst)], weight[:len(dst)]
	mean := dot(x, x) / float32(len(x))
	inv := float32(1 / math.Sqrt(float64(mean+float32(eps))))
	for i, v := range x {
		dst[i] = float32(v*inv) * weight[i]
	}
}

func addTo(dst, src []float32) {
	src = src[:len(dst)]
	for i := range dst {
		dst[i] += src[i]
	}
}
