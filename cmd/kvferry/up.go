package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/kv"
)

// upFlags is the command line of `kvferry up`.
type upFlags struct {
	listen     string
	topology   string
	check      bool
	faults     bool
	fire       fireFlags
	verbose    bool
	pair       pairOptions
	cpuCache   byteSize // of topologies other than a pair
	tierFaults []string
}

// topologyFlags are those that only some topologies know.
var topologyFlags = map[string][]string{
	"mode": {topologyPair}, "faults": {topologyPair}, "seed": {topologyPair}, "requests": {topologyPair}, "lease": {topologyPair},
	"inject-kv-fault": {topologyPair}, "bidirectional-kv-xfer": {topologyPair}, "cpu-cache": {topologyP2P, topologyStore}, "inject-tier-fault": {topologyP2P, topologyStore},
}

// checkTopology refuses an unknown topology and flags of another one.
func (f *upFlags) checkTopology(fl *pflag.FlagSet) (err error) {
	if all := []string{topologyPair, topologyP2P, topologyStore}; !slices.Contains(all, f.topology) {
		return usagef("--topology %q is unknown, use %s", f.topology, strings.Join(all, ", "))
	}
	fl.Visit(func(set *pflag.Flag) {
		if of, some := topologyFlags[set.Name]; some && !slices.Contains(of, f.topology) {
			err = usagef("--%s is for --topology %s, not %s", set.Name, strings.Join(of, " or "), f.topology)
		}
	})
	return err
}

func newUp() *cobra.Command {
	f := upFlags{cpuCache: 256 << 20}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start engines on this machine, and what connects them",
		Long: "Start a prefill engine, a decode engine and a router as three processes. The router listens at\n" +
			"--listen; the engines pick free loopback ports. One line is printed per request. Ctrl-C stops all\n" +
			"three. With --check, fixed prompts go through the pair and through one engine alone, the answers are\n" +
			"compared token by token, and the exit status says whether they agree. With --check --faults, 200\n" +
			"requests go through a pair whose processes are killed and stopped and whose connections are cut\n" +
			"and held back by a schedule: every answer must be right or an honest error.\n\n" +
			"With --topology p2p, start two engines that share their CPU caches: a prompt that the first has seen is\n" +
			"loaded by the second. The first listens at --listen, the second at the port after it. With --topology store\n" +
			"there is a store as well, and no request needs to say where its blocks may be.",
		Example: "  kvferry up\n" +
			"  kvferry up --listen 127.0.0.1:9000 --block-size 32\n" +
			"  kvferry up --check\n" +
			"  kvferry up --mode pull --check\n" +
			"  kvferry up --mode pull --bidirectional-kv-xfer --check\n" +
			"  kvferry up --check --faults --seed 7\n" +
			"  kvferry up --topology p2p\n" +
			"  kvferry up --topology store --check\n" +
			"  kvferry up --check --inject-kv-fault zero-head   # must fail: the decode engine damages what it receives",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.checkTopology(cmd.Flags()); err != nil {
				return err
			}
			if f.faults && !f.check {
				return usagef("--faults needs --check; see `kvferry up --help`")
			}
			for _, name := range []string{"seed", "requests"} {
				if cmd.Flags().Changed(name) && !f.faults {
					return usagef("--%s needs --check --faults; see `kvferry up --help`", name)
				}
			}
			f.pair.noDecodeCache = len(f.pair.kvFaults) > 0
			if err := f.pair.check(); err != nil {
				return err
			}
			if f.topology != topologyPair {
				return runUpRack(cmd.Context(), cmd.OutOrStdout(), f)
			}
			if f.faults {
				return runFireCheck(cmd.Context(), cmd.OutOrStdout(), f)
			}
			if f.check {
				return runCheck(cmd.Context(), cmd.OutOrStdout(), f)
			}
			return runUp(cmd.Context(), cmd.OutOrStdout(), f)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&f.listen, "listen", "127.0.0.1:8000", "`HOST:PORT` of the router; of the first engine where there is none")
	fl.StringVar(&f.topology, "topology", topologyPair, "`WHAT` to start: pd (prefill engine, decode engine, router), p2p (two engines that share CPU caches), store (p2p and a store)")
	fl.BoolVar(&f.check, "check", false, "compare with one engine, token by token, then stop")
	fl.BoolVar(&f.faults, "faults", false, "with --check: kill, stop and cut off the pair meanwhile")
	fl.Uint64Var(&f.fire.seed, "seed", 1, "with --faults: `NUMBER` that fixes the schedule of faults and requests")
	fl.IntVar(&f.fire.requests, "requests", fireRequests, "with --faults: how many `REQUESTS` to send")
	fl.BoolVarP(&f.verbose, "verbose", "v", false, "print every log line of all processes")
	fl.StringVar(&f.pair.model, "model", "kvferry-tiny", "`MODEL`: kvferry-tiny or the directory of a Llama checkpoint")
	fl.StringVar(&f.pair.mode, "mode", string(kv.Push), "`MODE` of hand-offs: push (the prefill engine writes) or pull (the decode engine reads)")
	fl.BoolVar(&f.pair.bidirectional, "bidirectional-kv-xfer", false, "with --mode pull: the prefill engine reads back what the decode engine kept of a conversation's last turn (conversation_id in a request's body)")
	fl.StringVar(&f.pair.transport, "transport", "auto", "`TRANSPORT` of KV blocks: auto (shm, as all run on this machine), shm or tcp")
	fl.IntVar(&f.pair.blockSize, "block-size", 16, "`TOKENS` per KV block")
	fl.IntVar(&f.pair.blocks, "blocks", 1024, "KV `BLOCKS` of each engine")
	fl.StringVar(&f.pair.layout, "layout", "LBHNC", "`LAYOUT` of a KV block: LBHNC or LBNHC")
	fl.DurationVar(&f.pair.lease, "lease", 30*time.Second, "how long the prefill engine keeps blocks for a decode engine that is silent")
	fl.StringSliceVar(&f.pair.kvFaults, "inject-kv-fault", nil, "damage received KV on the decode engine: swap-blocks, zero-layer, zero-head, stale-block")
	fl.Var(&f.cpuCache, "cpu-cache", "with --topology p2p or store: `SIZE` of each CPU cache")
	fl.StringSliceVar(&f.tierFaults, "inject-tier-fault", nil, "with --topology p2p or store: damage what the first engine's CPU cache keeps: flip-bit, zero-block, torn-block, unseen")
	return cmd
}

// runUp runs the pair until ctx ends or one of the three dies.
func runUp(ctx context.Context, w io.Writer, f upFlags) error {
	out := newLockedWriter(w)
	out.verbose = f.verbose
	l, err := listen("--listen", f.listen) // the trouble is told before three processes start
	if err != nil {
		return err
	}
	_ = l.Close()
	p, err := startPair(ctx, f.listen, f.pair, out)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	describe(out, p)
	died := p.died(ctx)
	if died == nil {
		out.linef("stopping")
	}
	if err := p.stop(); died == nil {
		died = err
	}
	return died
}

func describe(out *lockedWriter, p *pair) {
	url := p.router.ready["url"]
	out.linef("prefill engine  %s  (pid %d)", p.prefill.ready["url"], p.prefill.cmd.Process.Pid)
	out.linef("decode engine   %s  (pid %d)", p.decode.ready["url"], p.decode.cmd.Process.Pid)
	out.linef("router          %s  (pid %d)", url, p.router.cmd.Process.Pid)
	out.linef("")
	out.linef("try:  curl -s %s/v1/completions -d '{\"model\":\"%s\",\"prompt\":\"%s\",\"max_tokens\":32,\"temperature\":0}'", url, p.decode.ready["model"], text(1, 100))
	out.linef("ready up url=%s", url)
}

// elapsed rounds for people.
func elapsed(start time.Time) string { return fmt.Sprintf("%.1f s", time.Since(start).Seconds()) }
