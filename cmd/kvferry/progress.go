package main

import (
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// progress shows one line that is written over, on a terminal only. Its methods may be called from
// any goroutine.
type progress struct {
	w  io.Writer // nil when not on a terminal
	mu struct {
		sync.Mutex
		shown bool
	}
}

func newProgress(w io.Writer) *progress {
	f, ok := w.(*os.File)
	if !ok {
		return &progress{}
	}
	if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil {
		return &progress{}
	}
	return &progress{w: w}
}

func (p *progress) show(text string) {
	if p.w == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.w, "\r\x1b[K%s", text)
	p.mu.shown = true
}

func (p *progress) clear() {
	if p.w == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
	p.mu.shown = false
}
