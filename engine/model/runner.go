package model

// Runner computes with one model. It holds the scratch memory of the computation and belongs to
// one goroutine. Forward blocks until the result is there; the goroutines it starts have ended by
// then.
type Runner struct {
	model   *Model
	threads int
	fork    int           // multiplications that pay for one more goroutine
	attn    []attnScratch // one per thread
	helpers []chan *share // all threads but the caller's, while Dedicate holds; one share each

	// Activations of the current call, one row per new token.
	x     []float32 // [row][hidden] residual stream
	norm  []float32 // [row][hidden]
	q     []float32 // [row][heads*headDim]
	mixed []float32 // [row][heads*headDim] attention output
	k, v  []float32 // [row][kvHeads*headDim]
	gate  []float32 // [row][ffn]
	up    []float32 // [row][ffn]
	out   []float32 // [row][hidden] what a sublayer adds to the residual stream

	rows    []row
	tasks   []attnTask
	writers map[uint32]int
}

// row says where a new token belongs.
type row struct {
	seq      int
	position int
}

// NewRunner makes a Runner that uses up to threads goroutines at a time (below 1 counts as 1). The
// number of threads never changes a result.
func NewRunner(m *Model, threads int) *Runner {
	threads = max(1, threads)
	return &Runner{model: m, threads: threads, fork: forkWork, attn: make([]attnScratch, threads), writers: map[uint32]int{}}
}

// Model is the one that the Runner computes with.
func (r *Runner) Model() *Model { return r.model }

// forkWork takes a thread about 50 µs, many times what starting a goroutine costs.
const forkWork = 1 << 18

// each runs do(thread, i) for every i < n, on several threads if work, in multiplications, is
// worth it, and returns when all are done. Which thread runs which i is not fixed; no result may
// depend on it.
func (r *Runner) each(n, work int, do func(thread, i int)) {
	threads := min(r.threads, n, 1+work/r.fork)
	if threads <= 1 {
		for i := range n {
			do(0, i)
		}
		return
	}
	s := &share{n: n, do: do}
	s.done.Add(threads - 1)
	for t := 1; t < threads; t++ {
		if r.helpers != nil {
			r.helpers[t-1] <- s
			continue
		}
		go func() {
			defer s.done.Done()
			s.work(t)
		}()
	}
	s.work(0)
	s.done.Wait()
}

// project sets dst[row][outs] = src[row][ins] x weight^T. With several threads either rows or
// outputs are split, whichever there are more panels of.
func (r *Runner) project(dst, src, weight []float32, rows, outs, ins int) {
	const outPanel = 48 // outputs of one split, a multiple of the kernel width
	work := rows * outs * ins
	if rows >= r.threads*rowPanel || r.threads == 1 {
		r.each((rows+rowPanel-1)/rowPanel, work, func(_, i int) {
			r0 := i * rowPanel
			n := min(rowPanel, rows-r0)
			mulT(dst[r0*outs:], outs, src[r0*ins:], ins, n, weight, ins, outs, ins)
		})
		return
	}
	r.each((outs+outPanel-1)/outPanel, work, func(_, i int) {
		o0 := i * outPanel
		mulT(dst[o0:], outs, src, ins, rows, weight[o0*ins:], ins, min(outPanel, outs-o0), ins)
	})
}
