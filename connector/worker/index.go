package worker

// index finds entries by key: each key has a bucket of entries in the order in which they were
// added. All operations are constant time except walking a bucket. Its owner is the machine.
type index[K comparable, T any] struct {
	buckets map[K]*bucket[K, T]
}

type bucket[K comparable, T any] struct {
	key         K
	first, last *node[K, T]
	mark        uint64 // of the last walk that visited it
}

// node is one entry in one bucket.
type node[K comparable, T any] struct {
	entry      *T
	in         *bucket[K, T]
	prev, next *node[K, T]
}

func newIndex[K comparable, T any]() index[K, T] {
	return index[K, T]{make(map[K]*bucket[K, T])}
}

// add appends the entry to the bucket of key.
func (x *index[K, T]) add(key K, entry *T) *node[K, T] {
	b := x.buckets[key]
	if b == nil {
		b = &bucket[K, T]{key: key}
		x.buckets[key] = b
	}
	n := &node[K, T]{entry: entry, in: b, prev: b.last}
	if b.last == nil {
		b.first = n
	} else {
		b.last.next = n
	}
	b.last = n
	return n
}

// remove takes nodes out of their buckets; a bucket without nodes goes away.
func (x *index[K, T]) remove(nodes []*node[K, T]) {
	for _, n := range nodes {
		b := n.in
		if n.prev == nil {
			b.first = n.next
		} else {
			n.prev.next = n.next
		}
		if n.next == nil {
			b.last = n.prev
		} else {
			n.next.prev = n.prev
		}
		if b.first == nil {
			delete(x.buckets, b.key)
		}
	}
}

// find returns the oldest entry of key, or nil.
func (x *index[K, T]) find(key K) *T {
	if b := x.buckets[key]; b != nil {
		return b.first.entry
	}
	return nil
}

// visit calls f for every entry of key, oldest first, once per mark; f must not change the index.
func (x *index[K, T]) visit(key K, mark uint64, f func(*T)) {
	b := x.buckets[key]
	if b == nil || b.mark == mark {
		return
	}
	b.mark = mark
	for n := b.first; n != nil; n = n.next {
		f(n.entry)
	}
}
