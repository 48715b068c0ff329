package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/kv"
)

// upFlags is the command line of `kvferry up`.
type upFlags struct {
	listen  string
	check   bool
	faults  bool
	fire    fireFlags
	verbose bool
	pair    pairOptions
}

func newUp() *cobra.Command {
	var f upFlags
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start a prefill engine, a decode engine and a router on this machine",
		Long: "Start a prefill engine, a decode engine and a router as three processes. The router listens at\n" +
			"--listen; the engines pick free loopback ports. One line is printed per request. Ctrl-C stops all\n" +
			"three. With --check, fixed prompts go through the pair and through one engine alone, the answers are\n" +
			"compared token by token, and the exit status says whether they agree. With --check --faults, 200\n" +
			"requests go through a pair whose processes are killed and stopped and whose connections are cut\n" +
			"and held back by a schedule: every answer must be right or an honest error.",
		Example: "  kvferry up\n" +
			"  kvferry up --listen 127.0.0.1:9000 --block-size 32\n" +
			"  kvferry up --check\n" +
			"  kvferry up --mode pull --check\n" +
			"  kvferry up --mode pull --bidirectional-kv-xfer --check\n" +
			"  kvferry up --check --faults --seed 7\n" +
			"  kvferry up --check --inject-kv-fault zero-head   # must fail: the decode engine damages what it receives",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.faults && !f.check {
				return usagef("--faults needs --check; see `kvferry up --help`")
			}
			f.pair.noDecodeCache = len(f.pair.kvFaults) > 0
			if err := f.pair.check(); err != nil {
				return err
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
	fl.StringVar(&f.listen, "listen", "127.0.0.1:8000", "`HOST:PORT` of the router")
	fl.BoolVar(&f.check, "check", false, "compare the pair with one engine, token by token, then stop")
	fl.BoolVar(&f.faults, "faults", false, "with --check: kill, stop and cut off the pair meanwhile")
	fl.Uint64Var(&f.fire.seed, "seed", 1, "with --faults: `NUMBER` that fixes the schedule of faults and requests")
	fl.IntVar(&f.fire.requests, "requests", fireRequests, "with --faults: how many `REQUESTS` to send")
	fl.BoolVarP(&f.verbose, "verbose", "v", false, "print every log line of the three processes")
	fl.StringVar(&f.pair.model, "model", "kvferry-tiny", "`MODEL`: kvferry-tiny or the directory of a Llama checkpoint")
	fl.StringVar(&f.pair.mode, "mode", string(kv.Push), "`MODE` of hand-offs: push (the prefill engine writes) or pull (the decode engine reads)")
	fl.BoolVar(&f.pair.bidirectional, "bidirectional-kv-xfer", false, "with --mode pull: the prefill engine reads back what the decode engine kept of a conversation's last turn (conversation_id in a request's body)")
	fl.StringVar(&f.pair.transport, "transport", "auto", "`TRANSPORT` of KV blocks: auto (shm, as all run on this machine), shm or tcp")
	fl.IntVar(&f.pair.blockSize, "block-size", 16, "`TOKENS` per KV block")
	fl.IntVar(&f.pair.blocks, "blocks", 1024, "KV `BLOCKS` of each engine")
	fl.StringVar(&f.pair.layout, "layout", "LBHNC", "`LAYOUT` of a KV block: LBHNC or LBNHC")
	fl.StringVar(&f.pair.lease, "lease", "30s", "how long the prefill engine keeps blocks for a decode engine that is silent")
	fl.StringSliceVar(&f.pair.kvFaults, "inject-kv-fault", nil, "damage received KV on the decode engine: swap-blocks, zero-layer, zero-head, stale-block")
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
