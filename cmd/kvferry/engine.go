package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/engine/api"
	"github.com/kvferry/kvferry/engine/metrics"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// engineFlags is the command line of `kvferry engine`.
type engineFlags struct {
	listen      string
	model       string
	layout      string
	keys        string
	role        string
	mode        string
	engineID    string
	prefixCache bool
	policy      string
	threshold   string
	kvFaults    []string
	drain       time.Duration
	randomIDs   bool
	compat      bool
	engineTTL   time.Duration
	transfer    transferConfig
	cfg         engine.Config
	nice        int
	tier        tierFlags
	log         logFlags
}

func newEngine() *cobra.Command {
	var f engineFlags
	cmd := &cobra.Command{
		Use:   "engine",
		Short: "Run one engine",
		Long: "Run one engine with an OpenAI-compatible API. A prefill engine computes prompts and their KV cache goes\n" +
			"to decode engines, which generate: written by the one or read by the other (--mode). Without hand-off parameters a\n" +
			"request is served by the engine alone. The engine prints a line beginning with `ready` when requests\n" +
			"can be sent, and stops on SIGTERM or Ctrl-C after what is promised to a peer has been handed over.",
		Example: "  kvferry engine --role prefill --listen 127.0.0.1:8001\n" +
			"  kvferry engine --role decode --listen 127.0.0.1:8002 --blocks 4096 --block-size 32\n" +
			"  kvferry engine --model ./checkpoint          # a Llama checkpoint: config.json, model.safetensors, tokenizer.json\n" +
			"  kvferry engine --role prefill --listen 10.0.0.5:8001 --side-channel 10.0.0.5:5600 --agent-listen 10.0.0.5:0\n" +
			"  kvferry engine --cpu-cache 256MiB --tier p2p,fs --fs ./blocks --p2p-listen 127.0.0.1:5710",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseIdle(cmd.Flags(), f.needs()...); err != nil {
				return err
			}
			return runEngine(cmd.Context(), cmd.OutOrStdout(), f)
		},
	}
	f.add(cmd.Flags())
	return cmd
}

func (f *engineFlags) add(fl *pflag.FlagSet) {
	fl.StringVar(&f.listen, "listen", "127.0.0.1:8001", "`HOST:PORT` of the HTTP API; port 0 picks a free one")
	fl.StringVar(&f.role, "role", "both", "`ROLE` in hand-offs: prefill, decode or both")
	fl.StringVar(&f.mode, "mode", string(kv.Push), "`MODE` of hand-offs: push (prefill engines write) or pull (decode engines read); the same on all engines of a deployment")
	fl.StringVar(&f.model, "model", model.TinyName, "`MODEL`: kvferry-tiny or the directory of a Llama checkpoint")
	fl.StringVar(&f.cfg.ServedName, "served-model-name", "", "`NAME` that clients use; default: the model's own")
	fl.StringSliceVar(&f.cfg.Adapters, "adapter", nil, "`NAME` by which clients ask for the model with a low-rank adapter whose weights follow from the name; may be given several times")
	fl.StringVar(&f.engineID, "engine-id", "", "`ID` that peers know the engine by; default: random at every start")
	fl.IntVar(&f.cfg.BlockSize, "block-size", 16, "`TOKENS` per KV block")
	fl.IntVar(&f.cfg.NumBlocks, "blocks", 1024, "KV `BLOCKS` of this engine")
	fl.StringVar(&f.layout, "layout", "LBHNC", "`LAYOUT` of a KV block: LBHNC (heads outermost) or LBNHC (tokens outermost)")
	fl.StringVar(&f.keys, "keys", "plain", "`FORM` in which the cache keeps attention keys: plain or rotated; both engines of a pair need the same")
	fl.BoolVar(&f.prefixCache, "prefix-cache", true, "keep the KV of finished requests for prompts that begin alike")
	fl.IntVar(&f.cfg.MaxBatchTokens, "max-batch-tokens", 256, "most `TOKENS` that one step computes")
	fl.IntVar(&f.cfg.MaxRunning, "max-running", 32, "most `REQUESTS` in one step")
	fl.IntVar(&f.cfg.MaxQueue, "max-queue", 256, "most `REQUESTS` that wait; more are answered 429")
	fl.IntVar(&f.cfg.Threads, "threads", 0, "`THREADS` that compute; default: all processors")
	fl.IntVar(&f.nice, "nice", -1, "how much lower the priority of computing threads is, 0 to 19; default: 5 with --tier p2p, so that peers are answered while the model computes, else 0")
	fl.StringVar(&f.cfg.SideChannel, "side-channel", "127.0.0.1:0", "`HOST:PORT` where peers ask for this engine's metadata")
	fl.StringVar(&f.cfg.AdvertiseHost, "advertise-host", "", "`HOST` that peers are told; default: that of --side-channel")
	fl.StringVar(&f.cfg.AgentListen, "agent-listen", "127.0.0.1:0", "`HOST:PORT` where peers send KV blocks")
	fl.StringVar(&f.cfg.AgentAdvertise, "agent-advertise", "", "`HOST[:PORT]` that peers are told to send KV blocks to; default: --agent-listen")
	fl.Var(optionalInt{&f.cfg.DataParallelRank}, "data-parallel-rank", "`RANK` among data-parallel engines: side channel and agent are at as many ports higher, the engine id ends with _dpRANK; default: none of them")
	fl.StringVar(&f.cfg.Transport, "transport", engine.TransportAuto, "`TRANSPORT` of KV blocks: auto (shm with engines on this host, else tcp), shm or tcp")
	fl.DurationVar(&f.cfg.Lease, "lease", 30*time.Second, "how long a finished prompt's blocks are kept for a decode engine that is silent")
	fl.DurationVar(&f.cfg.RegistrationTimeout, "registration-timeout", 480*time.Second, "how long a request waits for a silent prefill engine")
	fl.StringVar(&f.policy, "kv-load-failure-policy", string(kv.FailOnLoadFailure), "`POLICY` when a request's KV does not come from the prefill engine: fail, or recompute it here; a request's kv_transfer_params may say otherwise")
	fl.BoolVar(&f.cfg.Bidirectional, "bidirectional-kv-xfer", false, "with --mode pull: keep the KV of an answer for the next turn of its conversation, and read back what a decode engine kept of an earlier one")
	fl.DurationVar(&f.cfg.DecoderBlocksTTL, "decoder-kv-blocks-ttl", connector.DefaultDecoderBlocksTTL, "with --bidirectional-kv-xfer: how long a decode engine keeps blocks for the next turn, unless it needs them")
	fl.StringVar(&f.threshold, "kv-recompute-threshold", "", "compute fewer than `TOKENS` here instead of having them brought by a peer; 0 turns it off; default: 64 with --bidirectional-kv-xfer, else 0")
	fl.DurationVar(&f.cfg.ParkTimeout, "park-timeout", 0, "how long requests that wait for KV may keep blocks that others need while nothing goes on; default: --registration-timeout")
	fl.DurationVar(&f.cfg.TransferSilence, "transfer-silence", 30*time.Second, "how long the transfer of one prompt's KV may make no progress")
	fl.StringVar(&f.cfg.VLLMVersion, "vllm-version", engine.DefaultVLLMVersion, "`VERSION` that enters the compatibility hash")
	fl.IntVar(&f.cfg.ConnectorVersion, "connector-version", engine.DefaultConnectorVersion, "NIXL connector `VERSION` to speak: 12 to 14")
	fl.BoolVar(&f.compat, "enforce-handshake-compat", true, "refuse peers whose compatibility hash differs; without it the operator answers for it that they fit")
	fl.DurationVar(&f.engineTTL, "engine-ttl", connector.DefaultEngineTTL, "after how long without use a peer is forgotten; 0: never")
	fl.Var(&f.transfer, "kv-transfer-config", "`JSON` as vLLM's option of this name; a flag of its own comes before what it says")
	fl.BoolVar(&f.randomIDs, "request-id-suffix", true, "append a random suffix to request ids, as vLLM does")
	fl.StringSliceVar(&f.kvFaults, "inject-kv-fault", nil, "damage received KV, for testing: swap-blocks, zero-layer, zero-head, stale-block; needs --prefix-cache=false")
	fl.DurationVar(&f.drain, "drain", 10*time.Second, "how long requests in flight and promised blocks may take after SIGTERM")
	f.tier.add(fl)
	f.log.add(fl)
}

// config turns the flags into an engine's configuration, loading the model.
func (f *engineFlags) config() (engine.Config, error) {
	cfg, err := f.settings()
	if err != nil || f.model == model.TinyName {
		return cfg, err
	}
	if cfg.Model, err = model.Load(f.model); err != nil {
		return cfg, fmt.Errorf("--model %s: %w", f.model, err)
	}
	if err := cfg.Validate(); err != nil {
		return cfg, &usageError{err}
	}
	return cfg, nil
}

// settings is the configuration without the model of a checkpoint.
func (f *engineFlags) settings() (engine.Config, error) {
	cfg := f.cfg
	if err := f.checkZeros(); err != nil {
		return cfg, err
	}
	if err := f.checkAddresses(); err != nil {
		return cfg, err
	}
	if err := checkDrain(f.drain); err != nil {
		return cfg, err
	}
	cfg.EngineID = kv.EngineID(f.engineID)
	cfg.Role = connector.Role(f.role)
	cfg.Mode = kv.TransferMode(f.mode)
	cfg.NoPrefixCache = !f.prefixCache
	cfg.Tier = f.tier.config()
	f.computing(&cfg)
	cfg.AnyCompat = !f.compat
	if cfg.EngineTTL = f.engineTTL; f.engineTTL <= 0 {
		cfg.EngineTTL = engine.Forever
	}
	cfg.LoadFailurePolicy = kv.LoadFailurePolicy(f.policy)
	if !cfg.LoadFailurePolicy.Valid() {
		return cfg, usagef("--kv-load-failure-policy %q is unknown, use fail or recompute", f.policy)
	}
	if f.threshold != "" {
		n, err := strconv.Atoi(f.threshold)
		if err != nil || n < 0 {
			return cfg, usagef("--kv-recompute-threshold %q is not a number of tokens, want 0 or more", f.threshold)
		}
		if cfg.RecomputeThreshold = n; n == 0 {
			cfg.RecomputeThreshold = -1
		}
	}
	for _, k := range f.kvFaults {
		cfg.InjectKVFault = append(cfg.InjectKVFault, engine.KVFault(k))
	}
	var err error
	if cfg.Layout, err = model.ParseLayout(f.layout); err != nil {
		return cfg, &usageError{fmt.Errorf("--layout: %w", err)}
	}
	if cfg.Keys, err = model.ParseKeys(f.keys); err != nil {
		return cfg, &usageError{fmt.Errorf("--keys: %w", err)}
	}
	if err := cfg.Validate(); err != nil {
		return cfg, &usageError{err}
	}
	return cfg, nil
}

// needs are what settings of an engine do nothing without.
func (f *engineFlags) needs() []need {
	return append(f.tier.needs(),
		need{[]string{"decoder-kv-blocks-ttl"}, f.cfg.Bidirectional, "--bidirectional-kv-xfer"})
}

// checkZeros refuses a 0 that engine.Config would take for "the default".
func (f *engineFlags) checkZeros() error {
	for _, z := range []struct {
		flag string
		zero bool
	}{
		{"block-size", f.cfg.BlockSize == 0}, {"blocks", f.cfg.NumBlocks == 0},
		{"max-batch-tokens", f.cfg.MaxBatchTokens == 0}, {"max-running", f.cfg.MaxRunning == 0},
		{"max-queue", f.cfg.MaxQueue == 0}, {"lease", f.cfg.Lease == 0},
		{"registration-timeout", f.cfg.RegistrationTimeout == 0}, {"connector-version", f.cfg.ConnectorVersion == 0},
		{"decoder-kv-blocks-ttl", f.cfg.DecoderBlocksTTL == 0},
		{"transfer-silence", f.cfg.TransferSilence == 0},
	} {
		if z.zero {
			return usagef("--%s is 0, must be more", z.flag)
		}
	}
	return nil
}

// checkAddresses refuses to listen on every interface without a name that peers can use.
func (f *engineFlags) checkAddresses() error {
	for _, a := range []struct{ flag, addr, advertise string }{
		{"side-channel", f.cfg.SideChannel, f.cfg.AdvertiseHost},
		{"agent-listen", f.cfg.AgentListen, f.cfg.AgentAdvertise + f.cfg.AdvertiseHost},
	} {
		if ip := hostIP(a.addr); a.advertise == "" && ip != nil && ip.IsUnspecified() {
			return usagef("--%s %s is every interface; say with --advertise-host by which host peers reach this one", a.flag, a.addr)
		}
	}
	return f.checkPorts()
}

// checkPorts refuses a port that is given twice.
func (f *engineFlags) checkPorts() error {
	all := []listenAt{{"--side-channel", f.cfg.SideChannel}}
	if rank := f.cfg.DataParallelRank; rank == nil || *rank == 0 { // else the others' ports are as many higher
		all = append(all, listenAt{"--listen", f.listen})
	}
	tcp, peers := f.cfg.Transport != engine.TransportSHM, f.tier.memory > 0 && slices.Contains(f.tier.cfg.Secondaries, engine.TierP2P)
	if tcp {
		all = append(all, listenAt{"--agent-listen", f.cfg.AgentListen})
	}
	if peers {
		all = append(all, listenAt{"--p2p-listen", f.tier.cfg.P2PListen})
	}
	if tcp && peers {
		all = append(all, listenAt{"--p2p-agent-listen", f.tier.cfg.P2PAgentListen})
	}
	return checkDistinct(all...)
}

// unlistened tells by its flag at which address an engine could not listen; other errors stay as they are.
func (f *engineFlags) unlistened(err error) error {
	l := (*engine.ListenError)(nil)
	if !errors.As(err, &l) {
		return err
	}
	flag := map[engine.Address]string{
		engine.SideChannelAddress: "--side-channel", engine.AgentAddress: "--agent-listen",
		engine.P2PListenAddress: "--p2p-listen", engine.P2PAgentListenAddress: "--p2p-agent-listen",
	}[l.Of]
	at := l.At
	if l.Of == engine.P2PAgentListenAddress && f.tier.cfg.P2PAgentListen == "" {
		flag, at = "--p2p-listen", f.tier.cfg.P2PListen // whose host it is
	}
	return cannotListen(flag, at, l.Err)
}

// unreachable are lines about addresses of which some are for other hosts and some for this one alone.
func (f *engineFlags) unreachable() []string {
	own := func(addr string) bool { // false for every interface
		host, _, err := net.SplitHostPort(addr)
		ip := net.ParseIP(host)
		return err == nil && kv.OwnHost(host) && (ip == nil || !ip.IsUnspecified())
	}
	side := own(f.cfg.SideChannel) && f.cfg.AdvertiseHost == ""
	agent := own(f.cfg.AgentListen) && f.cfg.AgentAdvertise == "" && f.cfg.Transport != engine.TransportSHM
	var lines []string
	switch {
	case agent && !own(f.cfg.SideChannel):
		lines = append(lines, "peers on other hosts reach the side channel but not the agent: they cannot send KV blocks; give --agent-listen a host that they reach")
	case side && !own(f.cfg.AgentListen):
		lines = append(lines, "peers on other hosts reach the agent but are told that the side channel is at 127.0.0.1, which is their own host; give --side-channel a host that they reach")
	case side && !own(f.listen):
		lines = append(lines, "clients on other hosts reach this engine, peers there do not: they are told 127.0.0.1, which is their own host; unless all peers run on this host, "+
			"give --side-channel and --agent-listen a host that they reach")
	}
	if t := &f.tier.cfg; slices.Contains(t.Secondaries, engine.TierP2P) && own(t.P2PListen) && t.P2PAdvertise == "" && !(side && own(f.listen)) {
		lines = append(lines, "peers on other hosts reach this engine, but not its CPU tier: it is known by an address by which every host means itself; "+
			"give --p2p-listen a host that they reach, or --p2p-advertise")
	}
	return lines
}

// hostIP is the IP of HOST:PORT, every interface for an empty host, nil for a name.
func hostIP(addr string) net.IP {
	host, _, err := net.SplitHostPort(addr)
	if err == nil && host == "" {
		return net.IPv6unspecified
	}
	return net.ParseIP(host)
}

// servedName is what clients call the model.
func servedName(cfg engine.Config) string {
	switch {
	case cfg.ServedName != "":
		return cfg.ServedName
	case cfg.Model != nil:
		return cfg.Model.Config().Name
	}
	return model.TinyName
}

func runEngine(ctx context.Context, w io.Writer, f engineFlags) error {
	log, err := f.log.logger(os.Stderr)
	if err != nil {
		return err
	}
	cfg, err := f.config()
	if err != nil {
		return err
	}
	for _, line := range f.unreachable() {
		log.Warn(line, "listen", f.listen, "side_channel", f.cfg.SideChannel, "agent_listen", f.cfg.AgentListen)
	}
	if keys := f.transfer.ineffective(); keys != nil {
		log.Warn("no NIXL library is loaded here: these keys of kv_transfer_config have no effect", "keys", keys)
	}
	cfg.Log = log
	makeRoom(cfg.Threads)
	counted := metrics.New(metrics.Config{Model: servedName(cfg), Mode: cfg.Mode})
	logged := newEventLog(log, f.tier.cfg.P2PStore)
	defer logged.Close()
	cfg.Events = event.Tee(counted, logged)
	l, err := listen("--listen", f.listen)
	if err != nil {
		return err
	}
	e, err := engine.New(cfg)
	if err != nil {
		_ = l.Close()
		return f.unlistened(err)
	}
	srv, err := api.New(api.Config{Engine: e, Collectors: []prometheus.Collector{counted}, Log: log, NoRequestIDSuffix: !f.randomIDs})
	if err != nil {
		_ = l.Close()
		_ = e.Close(ctx)
		return err
	}
	c := e.Coordinates()
	ready := fmt.Sprintf("ready engine url=http://%s role=%s model=%s context=%s engine_id=%s side_channel=%s",
		l.Addr(), c.Role, c.Model, strconv.Itoa(e.MaxContext()), c.EngineID, net.JoinHostPort(c.Host, strconv.Itoa(c.Port)))
	if c.P2PAddress != "" {
		ready += " p2p=" + c.P2PAddress
	}
	fmt.Fprintln(w, ready)
	return serve(ctx, log, l, srv.Server(), f.drain, e.Close)
}
