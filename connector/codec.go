package connector

import (
	"errors"
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvferry/kvferry/kv"
)

// BoundaryError says what is wrong with the bytes of a StepMeta or WorkerOutput.
type BoundaryError struct {
	Message string // "step metadata" or "worker output"
	Reason  string
}

func (e *BoundaryError) Error() string { return e.Message + ": " + e.Reason }

// AppendStepMeta appends the msgpack form of m: arrays of fields in the order of the types, an
// absent error as nil. It is for the processes of one engine, which are of one version; it is not
// for peers. Texts must be UTF-8. Typed error: *BoundaryError, for what DecodeStepMeta would refuse.
func AppendStepMeta(dst []byte, m *StepMeta) ([]byte, error) {
	return encode(dst, "step metadata", func(c *coder) { m.code(c) })
}

// DecodeStepMeta reads what AppendStepMeta wrote. Empty lists come back as nil. Typed error:
// *BoundaryError.
func DecodeStepMeta(b []byte) (StepMeta, error) {
	var m StepMeta
	if err := decode(b, "step metadata", func(c *coder) { m.code(c) }); err != nil {
		return StepMeta{}, err
	}
	return m, nil
}

// AppendWorkerOutput appends the msgpack form of o, as AppendStepMeta does.
func AppendWorkerOutput(dst []byte, o *WorkerOutput) ([]byte, error) {
	return encode(dst, "worker output", func(c *coder) { o.code(c) })
}

// DecodeWorkerOutput reads what AppendWorkerOutput wrote. Typed error: *BoundaryError.
func DecodeWorkerOutput(b []byte) (WorkerOutput, error) {
	var o WorkerOutput
	if err := decode(b, "worker output", func(c *coder) { o.code(c) }); err != nil {
		return WorkerOutput{}, err
	}
	return o, nil
}

func (m *StepMeta) code(c *coder) {
	c.fields(11)
	list(c, &m.Registrations, (*Registration).code)
	list(c, &m.Reads, (*Read).code)
	list(c, &m.Dropped, (*DroppedRequest).code)
	list(c, &m.Queued, (*QueuedRequest).code)
	list(c, &m.Processing, text[kv.RequestID])
	list(c, &m.Finished, (*FinishedBlocks).code)
	list(c, &m.Released, (*Release).code)
	list(c, &m.Cancels, text[kv.RequestID])
	list(c, &m.Withdrawn, (*Withdrawal).code)
	list(c, &m.Heartbeats, (*HeartbeatGroup).code)
	c.bool(&m.HasHeartbeats)
}

func (r *Registration) code(c *coder) {
	c.fields(8)
	text(&r.ID, c)
	text(&r.TransferID, c)
	blockIDs(&r.Blocks, c)
	number(&r.StartToken, c)
	number(&r.NumTokens, c)
	c.digest(&r.Digest)
	r.Peer.code(c)
	generation(&r.Lease, c)
}

func (r *Read) code(c *coder) {
	c.fields(6)
	r.Registration.code(c)
	text(&r.Remote, c)
	blockIDs(&r.RemoteBlocks, c)
	number(&r.Readers, c)
	c.bool(&r.Earlier)
	c.seconds(&r.Expiry)
}

func (q *QueuedRequest) code(c *coder) {
	c.fields(3)
	text(&q.ID, c)
	text(&q.TransferID, c)
	c.digest(&q.Digest)
}

func (w *Withdrawal) code(c *coder) {
	c.fields(7)
	text(&w.ID, c)
	text(&w.TransferID, c)
	text(&w.Remote, c)
	c.digest(&w.Digest)
	w.Peer.code(c)
	number(&w.Readers, c)
	text(&w.Reason, c)
}

func (p *PeerAddr) code(c *coder) {
	c.fields(5)
	text(&p.Engine, c)
	text(&p.Host, c)
	number(&p.Port, c)
	number(&p.TP, c)
	number(&p.PP, c)
}

func (f *FinishedBlocks) code(c *coder) {
	c.fields(9)
	text(&f.ID, c)
	text(&f.TransferID, c)
	blockIDs(&f.Blocks, c)
	number(&f.NumTokens, c)
	number(&f.Lease, c)
	c.digest(&f.Digest)
	generation(&f.Generation, c)
	c.bool(&f.Earlier)
	list(c, &f.Prefixes, func(d *Digest, c *coder) { c.digest(d) })
}

func (r *Release) code(c *coder) {
	c.fields(2)
	text(&r.ID, c)
	generation(&r.Lease, c)
}

func (d *DroppedRequest) code(c *coder) {
	c.fields(3)
	text(&d.ID, c)
	text(&d.TransferID, c)
	text(&d.Reason, c)
}

func (g *HeartbeatGroup) code(c *coder) {
	c.fields(2)
	g.Peer.code(c)
	list(c, &g.IDs, text[kv.RequestID])
}

func (o *WorkerOutput) code(c *coder) {
	c.fields(5)
	number(&o.Rank.PP, c)
	number(&o.Rank.TP, c)
	list(c, &o.Sent, (*SentReport).code)
	list(c, &o.Recv, (*ReceiveReport).code)
	list(c, &o.Progress, text[kv.RequestID])
}

func (r *SentReport) code(c *coder) {
	c.fields(2)
	text(&r.ID, c)
	optional(c, &r.Err)
}

func (r *ReceiveReport) code(c *coder) {
	c.fields(8)
	text(&r.ID, c)
	optional(c, &r.Err)
	number(&r.Transfer.Blocks, c)
	number(&r.Transfer.Bytes, c)
	number(&r.Transfer.Took, c)
	number(&r.Transfer.Waited, c)
	text(&r.Transfer.Transport, c)
	text(&r.Transfer.Why, c)
}

func (e *Error) code(c *coder) {
	c.fields(4)
	text(&e.Request, c)
	text(&e.Peer, c)
	text(&e.Phase, c)
	text(&e.Reason, c)
}

// coder walks a value once for both directions, so that the two cannot come to differ. The first
// error sticks.
type coder struct {
	b       []byte // encoding: what was written; decoding: what is left
	writing bool
	err     error
}

func encode(dst []byte, message string, walk func(*coder)) ([]byte, error) {
	c := &coder{b: dst, writing: true}
	walk(c)
	if c.err == nil && len(c.b)-len(dst) > maxBoundary {
		c.fail("has %d bytes, more than %d", len(c.b)-len(dst), maxBoundary)
	}
	if c.err != nil {
		return dst, &BoundaryError{message, c.err.Error()}
	}
	return c.b, nil
}

func decode(b []byte, message string, walk func(*coder)) error {
	c := &coder{b: b}
	if len(b) > maxBoundary {
		c.fail("has %d bytes, more than %d", len(b), maxBoundary)
	}
	walk(c)
	if c.err == nil && len(c.b) > 0 {
		c.fail("%d bytes follow it", len(c.b))
	}
	if c.err != nil {
		return &BoundaryError{message, c.err.Error()}
	}
	return nil
}

func (c *coder) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

// took keeps what a read left over.
func (c *coder) took(rest []byte, err error) {
	if err != nil {
		c.fail("%v", err)
		return
	}
	c.b = rest
}

// fields begins a value of n fields.
func (c *coder) fields(n uint32) {
	if got := c.array(n, uint64(n)); c.err == nil && got != n {
		c.fail("a value has %d fields, want %d", got, n)
	}
}

// array writes or reads an array header. When reading, no more than limit items are taken, and
// never more than bytes follow.
func (c *coder) array(n uint32, limit uint64) uint32 {
	switch {
	case c.err != nil:
		return 0
	case uint64(n) > limit:
		c.fail("a list has %d entries, more than %d", n, limit)
		return 0
	case c.writing:
		c.b = msgp.AppendArrayHeader(c.b, n)
		return n
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(c.b)
	c.took(rest, err)
	if c.err == nil && (uint64(n) > limit || uint64(n) > uint64(len(c.b))) {
		c.fail("a list announces %d entries", n)
	}
	if c.err != nil {
		return 0
	}
	return n
}

// list codes each entry with one. An empty list is read as nil. The list grows with the entries
// that are really there.
func list[T any](c *coder, l *[]T, one func(*T, *coder)) {
	n := c.array(uint32(min(len(*l), math.MaxUint32)), maxBoundaryEntries)
	if c.writing {
		for i := range *l {
			one(&(*l)[i], c)
		}
		return
	}
	for range n {
		var v T
		if one(&v, c); c.err != nil {
			return
		}
		*l = append(*l, v)
	}
}

func text[T ~string](v *T, c *coder) {
	if c.err != nil {
		return
	}
	if !c.writing {
		s, rest, err := msgp.ReadStringZC(c.b)
		c.took(rest, err)
		*v = T(s)
	}
	switch {
	case len(*v) > maxBoundaryText:
		c.fail("a text has %d bytes, more than %d", len(*v), maxBoundaryText)
	case !utf8.ValidString(string(*v)):
		c.fail("a text is not UTF-8")
	}
	if c.writing {
		c.b = msgp.AppendString(c.b, string(*v))
	}
}

func number[T ~int | ~int64](v *T, c *coder) {
	if c.err != nil {
		return
	}
	if c.writing {
		c.b = msgp.AppendInt64(c.b, int64(*v))
		return
	}
	n, rest, err := msgp.ReadInt64Bytes(c.b)
	c.took(rest, err)
	if *v = T(n); int64(*v) != n {
		c.fail("number %d does not fit", n)
	}
}

func generation(v *kv.Generation, c *coder) {
	if c.err != nil {
		return
	}
	if c.writing {
		c.b = msgp.AppendUint64(c.b, uint64(*v))
		return
	}
	n, rest, err := msgp.ReadUint64Bytes(c.b)
	c.took(rest, err)
	*v = kv.Generation(n)
}

func (c *coder) bool(v *bool) {
	if c.err != nil {
		return
	}
	if c.writing {
		c.b = msgp.AppendBool(c.b, *v)
		return
	}
	b, rest, err := msgp.ReadBoolBytes(c.b)
	c.took(rest, err)
	*v = b
}

// seconds codes a reading of a clock that may be absent.
func (c *coder) seconds(v **float64) {
	switch {
	case c.err != nil:
	case c.writing && *v == nil:
		c.b = msgp.AppendNil(c.b)
	case c.writing:
		c.b = msgp.AppendFloat64(c.b, **v)
	case msgp.IsNil(c.b):
		c.b = c.b[1:]
	default:
		f, rest, err := msgp.ReadFloat64Bytes(c.b)
		c.took(rest, err)
		*v = &f
	}
}

func (c *coder) digest(d *Digest) {
	if c.err != nil {
		return
	}
	if c.writing {
		c.b = msgp.AppendBytes(c.b, d[:])
		return
	}
	b, rest, err := msgp.ReadBytesZC(c.b)
	if err == nil && len(b) != len(d) {
		err = errors.New("a digest has the wrong length")
	}
	c.took(rest, err)
	copy(d[:], b)
}

// optional codes an error that may be absent.
func optional(c *coder, e **Error) {
	if c.err != nil {
		return
	}
	if c.writing && *e == nil {
		c.b = msgp.AppendNil(c.b)
		return
	}
	if !c.writing {
		if msgp.IsNil(c.b) {
			c.b = c.b[1:]
			return
		}
		*e = new(Error)
	}
	(*e).code(c)
}

// blockIDs keeps the number of groups, since an empty group is not the same as none.
func blockIDs(v *kv.BlockIDs, c *coder) {
	n := 0
	list(c, (*[][]kv.BlockID)(v), func(group *[]kv.BlockID, c *coder) {
		list(c, group, blockID)
		if n += len(*group); n > maxBoundaryBlocks {
			c.fail("a request has more than %d blocks", maxBoundaryBlocks)
		}
	})
}

func blockID(v *kv.BlockID, c *coder) {
	if c.err != nil {
		return
	}
	if c.writing {
		c.b = msgp.AppendUint32(c.b, uint32(*v))
		return
	}
	n, rest, err := msgp.ReadUint32Bytes(c.b)
	c.took(rest, err)
	*v = kv.BlockID(n)
}
