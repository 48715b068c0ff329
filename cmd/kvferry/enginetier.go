package main

import (
	"slices"

	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/tier"
)

// tierFlags are those of `kvferry engine` about the CPU tier.
type tierFlags struct {
	memory   byteSize
	fsBudget byteSize
	faults   []string
	cfg      engine.TierConfig
}

func (f *tierFlags) add(fl *pflag.FlagSet) {
	f.fsBudget = 1 << 30
	fl.Var(&f.memory, "cpu-cache", "`SIZE` of the CPU tier, such as 256MiB: KV blocks that the KV cache evicts stay there; 0: none")
	fl.StringSliceVar(&f.cfg.Secondaries, "tier", nil, "`TIERS` behind the CPU tier, in the order in which they are asked: p2p (other engines' CPU tiers), fs (files)")
	fl.StringVar(&f.cfg.FSDir, "fs", "", "`DIR` of the file tier; blocks there outlive the engine")
	fl.Var(&f.fsBudget, "fs-size", "`SIZE` that the files may have together")
	fl.StringVar(&f.cfg.P2PListen, "p2p-listen", "127.0.0.1:0", "`HOST:PORT` where peers ask for blocks of the CPU tier; port 0 picks a free one")
	fl.StringVar(&f.cfg.P2PAdvertise, "p2p-advertise", "", "`HOST[:PORT]` that peers know it by; default: --p2p-listen")
	fl.StringVar(&f.cfg.P2PAgentListen, "p2p-agent-listen", "", "`HOST:PORT` where peers send blocks of the CPU tier; default: the host of --p2p-listen and a free port")
	fl.StringVar(&f.cfg.P2PStore, "p2p-store", "", "`HOST:PORT` of a store: it is offered the blocks that are kept here, and asked for those of requests that name no source")
	fl.StringVar(&f.cfg.HashSeed, "hash-seed", engine.DefaultHashSeed, "`SEED` of block hashes; engines with different ones share no blocks")
	fl.StringSliceVar(&f.faults, "inject-tier-fault", nil, "damage blocks of the CPU tier, for testing: flip-bit, zero-block, torn-block: each is found and computed anew; unseen comes before the checksum and is not")
	fl.DurationVar(&f.cfg.Timeout, "tier-timeout", 0, "how long a request waits for the tiers to bring its next block before the rest is computed; default: 60s")
}

// needs are what settings of the CPU tier do nothing without.
func (f *tierFlags) needs() []need {
	files, peers := []string{"fs", "fs-size"}, []string{"p2p-listen", "p2p-advertise", "p2p-agent-listen", "p2p-store"}
	return []need{
		{slices.Concat([]string{"tier", "hash-seed", "inject-tier-fault", "tier-timeout"}, files, peers), f.memory > 0, "a CPU cache (--cpu-cache SIZE)"},
		{files, slices.Contains(f.cfg.Secondaries, engine.TierFS), "the tier of files (--tier fs)"},
		{peers, slices.Contains(f.cfg.Secondaries, engine.TierP2P), "the tier of peers (--tier p2p)"},
	}
}

// config is the tier's part of an engine's configuration.
func (f *tierFlags) config() engine.TierConfig {
	c := f.cfg
	c.Memory, c.FSBudget = int64(f.memory), int64(f.fsBudget)
	for _, x := range f.faults {
		c.InjectFault = append(c.InjectFault, tier.Fault(x))
	}
	return c
}
