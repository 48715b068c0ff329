package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
)

const (
	// fireLease is the lease of the fault check's engines: short, so that what only a lease brings
	// home comes home within the check.
	fireLease = 2 * time.Second
	// restartBound is how long a killed server may take to be ready again.
	restartBound = 20 * time.Second
)

// server is one process of the site, which comes back with the same command line.
type server struct {
	name string
	args []string

	mu struct {
		sync.Mutex
		child *child
		died  error // it ended although nobody killed it
	}
}

// site is the trio of the fault check. The servers live on loopback addresses of this process alone,
// so that their ports stay free while they are down; engines reach each other through relays.
//
//	prefill ──> relay ──> decode's agent, decode's side channel
//	decode  ──> relay ──> prefill's agent, prefill's side channel
type site struct {
	out                     *lockedWriter
	prefill, decode, router *server
	agents, sides           []*relay
	decodeTurns             [][]string // flags that the decode engine gets in turn, one list per start
	turn                    int        // the goroutine of the faults owns it after startSite

	received struct {
		sync.Mutex
		by         map[string]int // requests whose KV the decode engine got, by transport
		recomputed int            // whose KV did not come, and that it computed itself
		back       int            // turns of which the prefill engine has read KV back
	}
}

// startSite starts the trio, the engines side by side. On failure nothing is left running.
func startSite(ctx context.Context, o pairOptions, out *lockedWriter) (*site, error) {
	pid := os.Getpid()
	address := func(net int) string {
		return fmt.Sprintf("127.%d.%d.%d", net+pid>>16&31, pid>>8&255, max(1, pid&255))
	}
	ours, theirs := address(64), address(96) // for ports that are chosen here, and for those that a server chooses
	s := &site{out: out}
	s.received.by = map[string]int{}
	s.decodeTurns = turns(o.transport)
	fail := func(err error) (*site, error) {
		return nil, errors.Join(err, s.stop())
	}
	var err error
	if s.prefill, err = s.engine(o, "prefill", ours, theirs); err != nil {
		return fail(err)
	}
	if s.decode, err = s.engine(o, "decode", ours, theirs); err != nil {
		return fail(err)
	}
	var errs [2]error
	var wg sync.WaitGroup
	wg.Go(func() { errs[0] = s.start(ctx, s.prefill) })
	wg.Go(func() { errs[1] = s.start(ctx, s.decode) })
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return fail(err)
	}
	s.router = &server{name: "router", args: []string{"router", "--listen", theirs + ":0", "--log-format", "json",
		"--prefill", s.prefill.url(), "--decode", s.decode.url()}}
	if err := s.start(ctx, s.router); err != nil {
		return fail(err)
	}
	return s, nil
}

// turns are the flags that a decode engine gets in turn: both failure policies, and without a choice
// of transport both transports; auto is shm on one host.
func turns(transport string) [][]string {
	other := transport
	if transport == engine.TransportAuto {
		other = engine.TransportTCP
	}
	turn := func(transport string, policy kv.LoadFailurePolicy) []string {
		return []string{"--transport", transport, "--kv-load-failure-policy", string(policy)}
	}
	return [][]string{
		turn(transport, kv.FailOnLoadFailure), turn(other, kv.RecomputeOnLoadFailure),
		turn(transport, kv.RecomputeOnLoadFailure), turn(other, kv.FailOnLoadFailure),
	}
}

// engine makes the command line of one engine and the relays in front of it. One thread and small
// batches make its prefills long enough to be met in the middle.
func (s *site) engine(o pairOptions, role, ours, theirs string) (*server, error) {
	agent, err := newRelay()
	if err != nil {
		return nil, err
	}
	s.agents = append(s.agents, agent)
	side, err := newRelay()
	if err != nil {
		return nil, err
	}
	s.sides = append(s.sides, side)
	behind := func(r *relay) string { return ours + ":" + strconv.Itoa(r.port()) }
	agent.run(behind(agent))
	side.run(behind(side))
	args := append(o.engineArgs(role), "--listen", theirs+":0", "--threads", "1", "--max-batch-tokens", "64",
		"--agent-listen", behind(agent), "--agent-advertise", agent.addr,
		"--side-channel", behind(side), "--advertise-host", "127.0.0.1")
	return &server{name: role, args: args}, nil
}

// start starts a server, at the address that it had if it was there before.
func (s *site) start(ctx context.Context, v *server) error {
	ctx, cancel := context.WithTimeoutCause(ctx, restartBound, fmt.Errorf("not ready within %v", restartBound))
	defer cancel()
	args := v.args
	onLog := s.out.passWarnings(v.name)
	if warn := onLog; v == s.prefill {
		onLog = func(line string) { s.onPrefillLine(line); warn(line) }
	}
	if v == s.decode {
		onLog = s.onDecodeLine
		args = slices.Concat(args, s.decodeTurns[s.turn%len(s.decodeTurns)])
		s.turn++
	}
	c, err := startChild(ctx, "the "+v.name, onLog, args...)
	if err != nil {
		return err
	}
	u, err := url.Parse(c.ready["url"])
	if err != nil {
		c.stop()
		return fmt.Errorf("the %s's ready line has no URL: %v", v.name, c.ready)
	}
	v.args = append(v.args, "--listen", u.Host)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.child = c
	return nil
}

// onPrefillLine counts the turns that were read back.
func (s *site) onPrefillLine(line string) {
	if r, ok := parseRequestLine(line); ok && r.External > 0 {
		s.received.Lock()
		s.received.back++
		s.received.Unlock()
	}
}

// onDecodeLine counts how KV came.
func (s *site) onDecodeLine(line string) {
	if r, ok := parseRequestLine(line); ok {
		s.received.Lock()
		if r.Blocks > 0 {
			s.received.by[r.Transport]++
		}
		if r.Recomputed > 0 {
			s.received.recomputed++
		}
		s.received.Unlock()
	}
	s.out.passWarnings(s.decode.name)(line)
}

// readBack is how many turns were read back until now.
func (s *site) readBack() int {
	s.received.Lock()
	defer s.received.Unlock()
	return s.received.back
}

// transports says how KV came, for the summary; an error if not by what was asked for. A short check
// may find no quiet moment for one of two transports.
func (s *site) transports(setting string, short bool) (string, error) {
	s.received.Lock()
	defer s.received.Unlock()
	wanted := []string{setting}
	if setting == engine.TransportAuto {
		wanted = []string{engine.TransportSHM, engine.TransportTCP}
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(s.received.by)) {
		parts = append(parts, fmt.Sprintf("%d by %s", s.received.by[name], name))
	}
	parts = append(parts, fmt.Sprintf("%d recomputed", s.received.recomputed))
	if s.received.back > 0 {
		parts = append(parts, fmt.Sprintf("%d turns read back", s.received.back))
	}
	said := strings.Join(parts, ", ")
	for _, name := range wanted {
		if s.received.by[name] == 0 && !short {
			return said, fmt.Errorf("no KV came by %s; it came: %s", name, said)
		}
	}
	for name := range s.received.by {
		if !slices.Contains(wanted, name) {
			return said, fmt.Errorf("KV came by %s, not by %s as it was to", name, setting)
		}
	}
	return said, nil
}

func (v *server) get() *child {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.mu.child
}

func (v *server) url() string { return v.get().ready["url"] }

// kill ends a server with SIGKILL. One that was dead already is a fault of its own.
func (v *server) kill() {
	c := v.get()
	select {
	case <-c.done:
		v.mu.Lock()
		v.mu.died = errors.Join(v.mu.died, c.err)
		v.mu.Unlock()
	default:
		c.kill()
	}
}

func (v *server) signal(sig syscall.Signal) { _ = v.get().cmd.Process.Signal(sig) }

// ended says what died without having been killed.
func (s *site) ended() error {
	var errs []error
	for _, v := range []*server{s.prefill, s.decode, s.router} {
		v.mu.Lock()
		errs = append(errs, v.mu.died)
		v.mu.Unlock()
		select {
		case <-v.get().done:
			errs = append(errs, v.get().err)
		default:
		}
	}
	return errors.Join(errs...)
}

// stop ends all, the router first.
func (s *site) stop() error {
	var errs []error
	for _, v := range []*server{s.router, s.decode, s.prefill} {
		if v == nil || v.get() == nil {
			continue
		}
		v.get().stop()
		errs = append(errs, v.get().err)
	}
	for _, r := range append(s.agents, s.sides...) {
		r.close()
	}
	return errors.Join(errs...)
}

// inflict carries out one fault and returns when everything is as it was before, as far as an
// operator would see to it.
func (s *site) inflict(ctx context.Context, f plannedFault) error {
	switch f.kind {
	case killPrefill:
		return s.restart(ctx, s.prefill)
	case killDecode:
		return s.restart(ctx, s.decode)
	case killRouter:
		return s.restart(ctx, s.router)
	case stopPrefill:
		pause(ctx, f.lasts, func() { s.prefill.signal(syscall.SIGSTOP) }, func() { s.prefill.signal(syscall.SIGCONT) })
	case stopDecode:
		pause(ctx, f.lasts, func() { s.decode.signal(syscall.SIGSTOP) }, func() { s.decode.signal(syscall.SIGCONT) })
	case cutAgents:
		pause(ctx, f.lasts, each(s.agents, func(r *relay) { r.cut(true) }), each(s.agents, (*relay).accept))
	case holdAgents:
		pause(ctx, f.lasts, each(s.agents, (*relay).hold), each(s.agents, (*relay).release))
	case cutSide:
		each(s.sides, func(r *relay) { r.cut(true) })()
		err := s.restart(ctx, s.decode)
		pause(ctx, f.lasts, func() {}, each(s.sides, (*relay).accept))
		return err
	case holdSide:
		each(s.sides, (*relay).hold)()
		err := s.restart(ctx, s.prefill)
		pause(ctx, f.lasts, func() {}, each(s.sides, (*relay).release))
		return err
	default:
		return fmt.Errorf("fault %q is not known", f.kind)
	}
	return nil
}

func (s *site) restart(ctx context.Context, v *server) error {
	v.kill()
	return s.start(ctx, v)
}

func each(relays []*relay, do func(*relay)) func() {
	return func() {
		for _, r := range relays {
			do(r)
		}
	}
}

// pause does begin, and end after d or when ctx ends.
func pause(ctx context.Context, d time.Duration, begin, end func()) {
	begin()
	defer end()
	sleep(ctx, d)
}

// sleep returns after d, or false when ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
