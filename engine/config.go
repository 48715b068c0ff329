package engine

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/mux"
	"github.com/kvferry/kvferry/agent/shm"
	"github.com/kvferry/kvferry/agent/tcp"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/worker"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// Config says what an engine is. Zero values mean the defaults in the comments.
type Config struct {
	// EngineID names the engine to its peers. Default: a random UUID, so that an engine that
	// restarts is never taken for its predecessor.
	EngineID kv.EngineID
	// Role says which hand-offs are accepted. Default: connector.Both.
	Role connector.Role
	// Mode says who moves KV between engines: in kv.Push (default) a prefill engine writes into the
	// decode engine, in kv.Pull a decode engine reads from the prefill engine. Both engines of a hand-off
	// need the same, and a router that knows it.
	Mode kv.TransferMode
	// Model is the model to run. Default: model.Tiny().
	Model *model.Model
	// ServedName is what clients and the compatibility hash call the model. Default: its own name.
	ServedName string

	// Adapters are names by which requests ask for another model of the same shape: a low-rank adapter
	// whose weights follow from its name (model.SeededAdapter), so that all engines that know a
	// name agree.
	Adapters []string

	// BlockSize is in tokens. Default 16.
	BlockSize int
	// Layout is the order of dimensions in a block: LBHNC (default) or LBNHC.
	Layout model.Layout
	// Keys is the form in which the cache keeps keys; both engines of a hand-off need the same.
	// Default: model.PlainKeys, with which tokens tell whether blocks arrived in order.
	Keys model.Keys
	// NumBlocks is the size of the KV cache. Default 1024.
	NumBlocks int
	// NoPrefixCache turns the prefix cache off.
	NoPrefixCache bool

	// MaxBatchTokens is the most tokens that one step computes, over all requests. Default 256.
	MaxBatchTokens int
	// MaxRunning is the most requests in one step. Default 32.
	MaxRunning int
	// MaxQueue is the most requests that wait to run or for a peer; one more is refused with
	// KindOverload. Default 256.
	MaxQueue int
	// Threads is the most goroutines that compute at a time. Default: runtime.GOMAXPROCS(0).
	// It never changes a token.
	Threads int
	// Dedicated gives the computing goroutines threads of their own, whose priority is lower by Nice, 0 to
	// 19. Who answers peers while the model computes then gets a processor sooner, if the process has more
	// than Threads (GOMAXPROCS). Default: neither.
	Dedicated bool
	Nice      int

	// Lease is how long a finished prompt's blocks are kept for a decode engine that does not come
	// or is silent. Default 30 s.
	Lease time.Duration
	// RegistrationTimeout is how long a request waits for a silent prefill engine before it fails.
	// Default 480 s, the stock value.
	RegistrationTimeout time.Duration
	// Bidirectional makes conversations cheaper in pull: a decode engine keeps the KV of prompt and answer,
	// and the prefill engine of the next turn reads it back. Either engine of a pair may lack it.
	Bidirectional bool
	// DecoderBlocksTTL is how long a decode engine keeps blocks for the next turn, if it does not need
	// them before. Default 480 s, the stock value.
	DecoderBlocksTTL time.Duration
	// RecomputeThreshold is the number of tokens below which they are computed here instead of brought by
	// a peer. Default 64 if Bidirectional, as in stock, else off; below 0: off.
	RecomputeThreshold int
	// LoadFailurePolicy is what becomes of a request whose KV does not come from its peer, unless its
	// parameters say otherwise: kv.FailOnLoadFailure (default) or kv.RecomputeOnLoadFailure.
	LoadFailurePolicy kv.LoadFailurePolicy
	// ParkTimeout is how long requests that wait for KV may keep blocks that others need while
	// nothing at all goes on in this engine, however much their peers say that they live. Then
	// the latest of them are given up. Default: RegistrationTimeout.
	ParkTimeout time.Duration
	// TransferSilence is how long one WRITE or READ may make no progress. Default 30 s.
	TransferSilence time.Duration

	// SideChannel is the HOST:PORT at which peers ask for this engine's metadata; port 0 picks a
	// free one. Default 127.0.0.1:0.
	SideChannel string
	// AdvertiseHost is the host by which peers reach the side channel, as Coordinates and answers
	// name it. Default: SideChannel's host; needed if that or AgentListen's is every interface, and
	// then the agent's host, too.
	AdvertiseHost string
	// DataParallelRank makes the engine one of several that serve the same model side by side: the ports
	// of SideChannel, AgentListen, AgentAdvertise and the tier's, those that are not 0, are rank 0's and this
	// rank's are as many higher as its number; its engine id ends with _dp and the number, as stock
	// engines' do. Nil: it is none.
	DataParallelRank *int
	// AgentListen is the HOST:PORT of the transfer agent. Default 127.0.0.1:0.
	AgentListen string
	// AgentAdvertise is the HOST or HOST:PORT that peers are told to dial instead of AgentListen, for
	// an engine behind address translation.
	AgentAdvertise string
	// Transport chooses how KV travels: "shm" (shared memory, peers on this host only), "tcp", or "auto"
	// (default): for each peer the first of these that reaches it.
	Transport string

	// VLLMVersion and ConnectorVersion enter the compatibility hash: peers with other values refuse
	// the handshake. Defaults "0.32.0" and 14. ConnectorVersion may be 12 to 14.
	VLLMVersion      string
	ConnectorVersion int
	// AnyCompat admits peers whose compatibility hash differs. Stock calls the opposite
	// enforce_handshake_compat. Sizes and forms of keys that do not fit are refused all the same; that both
	// have the same weights is then the operator's word.
	AnyCompat bool
	// EngineTTL is after how long without use a peer is forgotten; Forever means never. Default 1 h,
	// the stock value.
	EngineTTL time.Duration

	// Tier keeps KV blocks in CPU memory and behind it. Default: none.
	Tier TierConfig

	// InjectKVFault damages received KV before its request runs, one of the faults in turn per
	// request. It is the self-test of `kvferry up --check`: an engine that answers the same tokens
	// with damaged KV proves that the check cannot see. It needs NoPrefixCache, so that damage
	// cannot outlive its request.
	InjectKVFault []KVFault

	// Events gets every typed event. Default: event.Discard.
	Events event.Sink
	// Log gets a line per finished request and per injected fault. Default: none.
	Log *slog.Logger

	newAgent func(Config) (agent.Agent, error) // of tests; nil: by Transport
	onStep   func()                            // of tests: called on the model goroutine before each step; may block
}

// Transports that Config.Transport knows.
const (
	TransportAuto = mux.Auto
	TransportSHM  = shm.Transport
	TransportTCP  = tcp.Transport
)

// Forever as Config.EngineTTL keeps peers for ever.
const Forever time.Duration = -1

// Stock peers' numbers, the defaults of Config.
const (
	DefaultVLLMVersion      = "0.32.0"
	DefaultConnectorVersion = 14
)

// withDefaults fills what is zero.
func (c Config) withDefaults() Config {
	if c.EngineID == "" {
		c.EngineID = kv.EngineID(newUUID())
	}
	c.EngineID = c.rankID()
	c.AdvertiseHost = kv.BareHost(c.AdvertiseHost)
	if c.Role == "" {
		c.Role = connector.Both
	}
	if c.Mode == "" {
		c.Mode = kv.Push
	}
	if c.Model == nil {
		c.Model = model.Tiny()
	}
	orString := func(v *string, d string) {
		if *v == "" {
			*v = d
		}
	}
	orInt := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	orTime := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	orString(&c.ServedName, c.Model.Config().Name)
	orInt(&c.BlockSize, 16)
	orInt(&c.NumBlocks, 1024)
	orInt(&c.MaxBatchTokens, 256)
	orInt(&c.MaxRunning, 32)
	orInt(&c.MaxQueue, 256)
	orInt(&c.Threads, runtime.GOMAXPROCS(0))
	orTime(&c.Lease, 30*time.Second)
	orTime(&c.EngineTTL, connector.DefaultEngineTTL)
	orTime(&c.RegistrationTimeout, 480*time.Second)
	orTime(&c.ParkTimeout, c.RegistrationTimeout)
	orTime(&c.DecoderBlocksTTL, connector.DefaultDecoderBlocksTTL)
	if c.Bidirectional {
		orInt(&c.RecomputeThreshold, connector.DefaultRecomputeThreshold)
	}
	orTime(&c.TransferSilence, worker.DefaultTransferSilence)
	if c.LoadFailurePolicy == "" {
		c.LoadFailurePolicy = kv.FailOnLoadFailure
	}
	orString(&c.SideChannel, "127.0.0.1:0")
	orString(&c.AgentListen, "127.0.0.1:0")
	orString(&c.Transport, TransportAuto)
	c.Tier = c.Tier.withDefaults()
	orString(&c.VLLMVersion, DefaultVLLMVersion)
	orInt(&c.ConnectorVersion, DefaultConnectorVersion)
	if c.Events == nil {
		c.Events = event.Discard
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports everything in a Config that no engine can run with; zero values are defaults.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("engine config: "+format, args...)) }
	between := func(name string, v, lo, hi int) {
		if v < lo || v > hi {
			bad("%s is %d, must be %d to %d", name, v, lo, hi)
		}
	}
	switch c.Role {
	case connector.Producer, connector.Consumer, connector.Both:
	default:
		bad("role %q is unknown, use prefill, decode or both", c.Role)
	}
	c.checkAdapters(bad)
	if !c.Mode.Valid() {
		bad("mode %q is unknown, use push or pull", c.Mode)
	}
	between("block size", c.BlockSize, 1, model.MaxBlockSize)
	between("number of blocks", c.NumBlocks, 1, 1<<30)
	between("batch tokens", c.MaxBatchTokens, 1, MaxBatchTokensLimit)
	between("running requests", c.MaxRunning, 1, MaxRunningLimit)
	between("queue length", c.MaxQueue, 1, MaxQueueLimit)
	between("threads", c.Threads, 1, 1024)
	between("nice", c.Nice, 0, 19)
	between("connector version", c.ConnectorVersion, 12, 14)
	if c.MaxBatchTokens < c.MaxRunning {
		bad("%d batch tokens are fewer than %d running requests, so that not all could go on in one step",
			c.MaxBatchTokens, c.MaxRunning)
	}
	if len(errs) == 0 && model.CacheBytes(c.Model.Config(), c.BlockSize, 1) > MaxCacheBytes/c.NumBlocks {
		bad("%d blocks of %d tokens need more than %d bytes", c.NumBlocks, c.BlockSize, MaxCacheBytes)
	}
	if c.Layout != model.LBHNC && c.Layout != model.LBNHC {
		bad("%v, use LBHNC or LBNHC", c.Layout)
	}
	if c.Keys > model.RotatedKeys {
		bad("%v, use plain or rotated", c.Keys)
	}
	if c.Lease < time.Second {
		bad("lease of %v is below one second", c.Lease)
	}
	if c.RegistrationTimeout < time.Second {
		bad("registration timeout of %v is below one second", c.RegistrationTimeout)
	}
	if c.ParkTimeout < time.Second {
		bad("park timeout of %v is below one second", c.ParkTimeout)
	}
	if c.Bidirectional && c.Mode == kv.Push {
		bad("bidirectional_kv_xfer works in pull only, and the mode is push: use --mode pull, or leave it off")
	}
	if c.DecoderBlocksTTL < time.Second {
		bad("decoder_kv_blocks_ttl of %v is below one second", c.DecoderBlocksTTL)
	}
	if c.TransferSilence < time.Second {
		bad("transfer silence of %v is below one second", c.TransferSilence)
	}
	if !c.LoadFailurePolicy.Valid() {
		bad("load failure policy %q is unknown, use fail or recompute", c.LoadFailurePolicy)
	}
	c.checkAddresses(bad)
	if !slices.Contains([]string{TransportAuto, TransportSHM, TransportTCP}, c.Transport) {
		bad("transport %q is unknown, use auto, shm or tcp", c.Transport)
	}
	for _, f := range c.InjectKVFault {
		if !slices.Contains(KVFaults, f) {
			bad("KV fault %q is unknown, use %s", f, list(KVFaults))
		}
	}
	if slices.Contains(c.InjectKVFault, SwapBlocks) && c.Keys != model.PlainKeys {
		bad("KV fault %s needs plain keys: with %v ones no token shows it", SwapBlocks, c.Keys)
	}
	if len(c.InjectKVFault) > 0 && !c.NoPrefixCache {
		bad("KV faults need the prefix cache to be off, or damaged blocks would be given to other requests")
	}
	c.validateTier(bad)
	return errors.Join(errs...)
}

// checkAdapters reports names that requests could not tell apart.
func (c Config) checkAdapters(bad func(format string, args ...any)) {
	if len(c.Adapters) > MaxAdapters {
		bad("%d adapters, at most %d are possible", len(c.Adapters), MaxAdapters)
	}
	for i, name := range c.Adapters {
		switch {
		case name == "" || len(name) > model.MaxAdapterName:
			bad("an adapter's name has %d bytes, must have 1 to %d", len(name), model.MaxAdapterName)
		case name == c.ServedName:
			bad("adapter %q is called as the model itself", name)
		case slices.Contains(c.Adapters[:i], name):
			bad("adapter %q is named twice", name)
		}
	}
}

// newUUID is a random UUID of version 4.
func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:])
}
