package model

import (
	"crypto/sha256"
	"fmt"
	"unsafe"
)

// Digest is a digest of the model's shape and of all its weights: KV that outlives a process is of use
// only to a model with an equal one. It reads every weight, which takes about a second for each
// gigabyte.
func (m *Model) Digest() [sha256.Size]byte {
	h := sha256.New()
	c := m.Config()
	c.Name, c.EOS, c.BOS = "", nil, 0 // have no part in KV
	fmt.Fprintf(h, "%+v\n", c)
	for _, t := range m.weights.tensors(m.cfg) {
		data := *t.data
		fmt.Fprintf(h, "%s %d\n", t.name, len(data))
		h.Write(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*4))
	}
	return [sha256.Size]byte(h.Sum(nil))
}
