package fs

import (
	"container/list"

	"github.com/kvferry/kvferry/tier/core"
)

// index is what the folder holds, and what is being written. Guarded by the Tier's mu.
type index struct {
	budget, used int64
	files        map[core.Key]*file
	order        list.List // of *file, least recently used first; only those that are there
}

type file struct {
	key     core.Key
	size    int64
	busy    bool // being written or removed: not there, and its name not to be used
	readers int
	elem    *list.Element // nil while busy
}

func newIndex(budget int64) *index { return &index{budget: budget, files: map[core.Key]*file{}} }

// has reports whether a block can be read. Being asked for counts as use: the load follows.
func (x *index) has(k core.Key) bool {
	f := x.files[k]
	if f == nil || f.busy {
		return false
	}
	x.order.MoveToBack(f.elem)
	return true
}

// add enters a file that is there.
func (x *index) add(k core.Key, size int64) {
	f := &file{key: k, size: size}
	f.elem = x.order.PushBack(f)
	x.files[k] = f
	x.used += size
}

// begin makes room for a file about to be written. The victims are to be removed from the disk first,
// and then from the index by left. It reports false, without victims, when there is no room. The key
// must not be in the index.
func (x *index) begin(k core.Key, size int64) (victims []core.Key, ok bool) {
	victims, ok = x.room(size)
	if ok {
		x.files[k] = &file{key: k, size: size, busy: true}
		x.used += size
	}
	return victims, ok
}

// room takes files out, least recently used first, until size more bytes fit; nothing if they cannot.
// Those being read stay.
func (x *index) room(size int64) (victims []core.Key, ok bool) {
	var gone []*file
	after := x.used + size
	for e := x.order.Front(); e != nil && after > x.budget; e = e.Next() {
		if f := e.Value.(*file); f.readers == 0 {
			gone = append(gone, f)
			after -= f.size
		}
	}
	if after > x.budget {
		return nil, false
	}
	for _, f := range gone {
		x.leave(f)
		victims = append(victims, f.key)
	}
	return victims, true
}

// leave takes a file out of use; its key stays taken until left.
func (x *index) leave(f *file) {
	x.order.Remove(f.elem)
	f.elem, f.busy = nil, true
	x.used -= f.size
}

// left says that files are no longer on the disk.
func (x *index) left(keys []core.Key) {
	for _, k := range keys {
		delete(x.files, k)
	}
}

// wrote ends begin.
func (x *index) wrote(k core.Key, ok bool) {
	f := x.files[k]
	if ok {
		f.elem, f.busy = x.order.PushBack(f), false
		return
	}
	delete(x.files, k)
	x.used -= f.size
}

// read begins a reader; done ends it, and with broken takes the file out of use. done reports whether
// the file is to be removed from the disk now, and then from the index by left.
func (x *index) read(k core.Key) bool {
	f := x.files[k]
	if f == nil || f.busy {
		return false
	}
	f.readers++
	return true
}

func (x *index) done(k core.Key, broken bool) (remove bool) {
	f := x.files[k]
	f.readers--
	switch {
	case f.busy: // another reader has found it broken
	case broken:
		x.leave(f)
	default:
		x.order.MoveToBack(f.elem)
	}
	return f.busy && f.readers == 0
}
