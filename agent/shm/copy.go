package shm

import (
	"fmt"
	"runtime/debug"

	"github.com/kvferry/kvferry/agent/internal/memory"
)

// span is n bytes to copy between two addresses of this process.
type span struct{ dst, src, n uint64 }

// copySpans copies. Everything is mapped, and sealed files do not shrink; should a page of a peer
// not be had all the same (a machine out of memory), it is an error of this one copy and not the
// end of the process.
func copySpans(list []span) (err error) {
	defer func() {
		if r := recover(); r != nil {
			fault, ok := r.(interface{ Addr() uintptr })
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("page at %#x cannot be had", fault.Addr())
		}
	}()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	for _, s := range list {
		copy(memory.At(s.dst, int(s.n)), memory.At(s.src, int(s.n)))
	}
	return nil
}
