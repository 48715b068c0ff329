package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/pflag"
)

// What `up --topology` starts.
const (
	topologyPair  = "pd"    // a prefill engine, a decode engine, a router
	topologyP2P   = "p2p"   // two engines that share their CPU caches
	topologyStore = "store" // the same and a store, which both use
)

// rackOptions are what `up` hands to two engines that share CPU caches.
type rackOptions struct {
	pair      pairOptions
	cpuCache  byteSize
	withStore bool
	faults    []string // of the first engine's CPU cache
}

// rack is two engines, and a store or none, each a process of its own.
type rack struct {
	store         *child // nil: none
	first, second *child
	logs          map[*child]*requestLog
	out           *lockedWriter
	options       rackOptions
}

// engineArgs is the command line of one engine; extra comes last. store is where its store is, "" for none.
func (o rackOptions) engineArgs(listen, store string, extra ...string) []string {
	args := []string{"engine", "--listen", listen, "--log-format", "json",
		"--model", o.pair.model, "--transport", o.pair.transport, "--layout", o.pair.layout,
		"--block-size", strconv.Itoa(o.pair.blockSize), "--blocks", strconv.Itoa(o.pair.blocks),
		"--cpu-cache", o.cpuCache.String(), "--tier", "p2p"}
	if store != "" {
		args = append(args, "--p2p-store", store)
	}
	return append(args, extra...)
}

// firstExtra is what the first engine is told and the second is not.
func (o rackOptions) firstExtra() []string {
	if len(o.faults) == 0 {
		return nil
	}
	return []string{"--inject-tier-fault", strings.Join(o.faults, ",")}
}

// check finds what no engine would start with before one is started.
func (o rackOptions) check() error {
	var f engineFlags
	fs := pflag.NewFlagSet("engine", pflag.ContinueOnError)
	f.add(fs)
	if err := fs.Parse(o.engineArgs("127.0.0.1:0", "", o.firstExtra()...)[1:]); err != nil {
		return &usageError{err}
	}
	_, err := f.settings()
	return err
}

// startRack starts the store, if there is to be one, and then both engines. On failure nothing is left
// running.
func startRack(ctx context.Context, listens [2]string, o rackOptions, out *lockedWriter) (*rack, error) {
	r := &rack{out: out, options: o, logs: map[*child]*requestLog{}}
	if o.withStore {
		var err error
		if r.store, err = startChild(ctx, "the store", out.passWarnings("store"), "store", "--listen", "127.0.0.1:0",
			"--p2p-listen", "127.0.0.1:0", "--transport", o.pair.transport, "--size", o.cpuCache.String(), "--log-format", "json"); err != nil {
			return nil, err
		}
	}
	var errs [2]error
	var starting sync.WaitGroup
	var logs [2]*requestLog
	for i, to := range []**child{&r.first, &r.second} {
		var extra []string
		if i == 0 {
			extra = o.firstExtra()
		}
		starting.Go(func() {
			*to, logs[i], errs[i] = r.startEngine(ctx, fmt.Sprintf("engine %d", i+1), listens[i], extra...)
		})
	}
	starting.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		_ = r.stop()
		return nil, err
	}
	r.logs[r.first], r.logs[r.second] = logs[0], logs[1]
	return r, nil
}

// startEngine starts one engine, with what there is of a store.
func (r *rack) startEngine(ctx context.Context, name, listen string, extra ...string) (*child, *requestLog, error) {
	log, store := newRequestLog(), ""
	if r.store != nil {
		store = r.store.ready["p2p"]
	}
	c, err := startChild(ctx, name, func(line string) {
		if l, ok := parseRequestLine(line); ok {
			log.add(l)
			if !r.out.quiet {
				r.out.linef("%s: %s", name, l.tierString())
			}
			return
		}
		r.out.passWarnings(name)(line)
	}, r.options.engineArgs(listen, store, extra...)...)
	return c, log, err
}

// stop ends all, the engines first, and returns what went wrong.
func (r *rack) stop() error {
	var errs []error
	for _, c := range []*child{r.first, r.second, r.store} {
		if c != nil {
			c.stop()
			errs = append(errs, c.err)
		}
	}
	return errors.Join(errs...)
}

// died waits until one has ended, or ctx.
func (r *rack) died(ctx context.Context) error {
	var store <-chan struct{} // never, without one
	if r.store != nil {
		store = r.store.done
	}
	select {
	case <-ctx.Done():
		return nil
	case <-r.first.done:
		return r.first.err
	case <-r.second.done:
		return r.second.err
	case <-store:
		return r.store.err
	}
}

// kvSource is what a request says that may find blocks at a peer.
type kvSource struct {
	Source struct {
		ID   string `json:"kv_request_id"`
		Host string `json:"remote_host"`
		Port int    `json:"remote_port"`
	} `json:"remote_kv_source"`
}

// sourceOf names an engine as a request's source.
func sourceOf(e *child, id string) (*kvSource, error) {
	host, port, err := net.SplitHostPort(e.ready["p2p"])
	if err != nil {
		return nil, fmt.Errorf("%s says nothing of where peers ask it: %v", e.name, e.ready)
	}
	s := new(kvSource)
	s.Source.ID, s.Source.Host = id, host
	if s.Source.Port, err = strconv.Atoi(port); err != nil {
		return nil, err
	}
	return s, nil
}

// listensOf is where the two engines listen: at the given address, and at the port after it.
func listensOf(listen string) ([2]string, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return [2]string{}, usagef("--listen %s: %v; give HOST:PORT", listen, err)
	}
	n, err := strconv.Atoi(port)
	if err != nil || n < 0 || n > 65534 {
		return [2]string{}, usagef("--listen %s: give a port from 0 to 65534; the second engine has the one after it", listen)
	}
	if n == 0 {
		return [2]string{listen, listen}, nil
	}
	return [2]string{listen, net.JoinHostPort(host, strconv.Itoa(n+1))}, nil
}
