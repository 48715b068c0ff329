package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/pflag"
)

// pairOptions are what `up` hands to its engines.
type pairOptions struct {
	model, transport  string
	mode              string
	bidirectional     bool
	readAll           bool // however little: no recompute threshold
	blockSize, blocks int
	layout            string
	lease             time.Duration
	kvFaults          []string // for the decode engine
	noDecodeCache     bool     // its prefix cache off
}

// pair is a prefill engine, a decode engine and a router, each a process of its own.
type pair struct {
	prefill, decode, router *child
	decodeLog               *requestLog
	out                     *lockedWriter
}

// engineArgs is the command line of one engine of the pair.
func (o pairOptions) engineArgs(role string) []string {
	args := []string{"engine", "--role", role, "--listen", "127.0.0.1:0", "--log-format", "json",
		"--mode", o.mode, "--model", o.model, "--transport", o.transport, "--layout", o.layout, "--lease", o.lease.String(),
		"--block-size", strconv.Itoa(o.blockSize), "--blocks", strconv.Itoa(o.blocks)}
	if o.bidirectional {
		args = append(args, "--bidirectional-kv-xfer")
		if o.readAll {
			args = append(args, "--kv-recompute-threshold", "0")
		}
	}
	if role == "decode" {
		if o.noDecodeCache {
			args = append(args, "--prefix-cache=false")
		}
		for _, f := range o.kvFaults {
			args = append(args, "--inject-kv-fault", f)
		}
	}
	return args
}

// check finds what no engine would start with before one is started. What only a checkpoint's own
// numbers make wrong is left to the engine.
func (o pairOptions) check() error {
	var f engineFlags
	fs := pflag.NewFlagSet("engine", pflag.ContinueOnError)
	f.add(fs)
	if err := fs.Parse(o.engineArgs("decode")[1:]); err != nil {
		return &usageError{err}
	}
	_, err := f.settings()
	return err
}

// startPair starts the three, the engines side by side. On failure nothing is left running. Lines
// about requests and warnings go to out.
func startPair(ctx context.Context, listen string, o pairOptions, out *lockedWriter) (*pair, error) {
	p := &pair{decodeLog: newRequestLog(), out: out}
	var errs [2]error
	var wg sync.WaitGroup
	wg.Go(func() {
		p.prefill, errs[0] = startChild(ctx, "the prefill engine", out.passWarnings("prefill"), o.engineArgs("prefill")...)
	})
	wg.Go(func() {
		p.decode, errs[1] = startChild(ctx, "the decode engine", p.onDecodeLine, o.engineArgs("decode")...)
	})
	wg.Wait()
	if err := errors.Join(errs[0], errs[1]); err != nil {
		p.stop()
		return nil, err
	}
	if err := p.startRouter(ctx, listen); err != nil {
		p.stop()
		return nil, err
	}
	return p, nil
}

func (p *pair) startRouter(ctx context.Context, listen string) error {
	router, err := startChild(ctx, "the router", p.out.passWarnings("router"), "router", "--listen", listen, "--log-format", "json",
		"--prefill", p.prefill.ready["url"], "--decode", p.decode.ready["url"])
	p.router = router
	return err
}

func (p *pair) onDecodeLine(line string) {
	if r, ok := parseRequestLine(line); ok {
		p.decodeLog.add(r)
		p.out.request(r)
		return
	}
	p.out.passWarnings("decode")(line)
}

// stop ends all three, the router first so that no new request arrives, and returns what went wrong.
func (p *pair) stop() error {
	var errs []error
	for _, c := range []*child{p.router, p.decode, p.prefill} {
		if c != nil {
			c.stop()
			errs = append(errs, c.err)
		}
	}
	return errors.Join(errs...)
}

// died waits until one of the three has ended, or ctx.
func (p *pair) died(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-p.prefill.done:
		return p.prefill.err
	case <-p.decode.done:
		return p.decode.err
	case <-p.router.done:
		return p.router.err
	}
}

// lockedWriter prints whole lines from several goroutines.
type lockedWriter struct {
	verbose bool // all log lines
	quiet   bool // no request lines
	mu      struct {
		sync.Mutex
		w io.Writer
	}
}

func newLockedWriter(w io.Writer) *lockedWriter {
	l := &lockedWriter{}
	l.mu.w = w
	return l
}

func (l *lockedWriter) linef(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.mu.w, format+"\n", args...)
}

func (l *lockedWriter) request(r requestLine) {
	if !l.quiet {
		l.linef("%s", r)
	}
}

// passWarnings gives a log sink of one process that prints what is worse than information.
func (l *lockedWriter) passWarnings(who string) func(string) {
	return func(line string) {
		if l.verbose || (!l.quiet && isWarning(line)) {
			l.linef("%s: %s", who, line)
		}
	}
}
