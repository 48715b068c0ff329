package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/choose"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/scheduler"
	"github.com/kvferry/kvferry/connector/worker"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
	"github.com/kvferry/kvferry/wire"
)

// One rank: this engine computes in one process.
const (
	tpSize = 1
	ppSize = 1
)

// Facts of the cache that peers compare.
const (
	cacheDType = "auto"
	modelDType = "torch.float32"
)

// attnBackend names what decides the contents of a block. It is this engine's own: its blocks look
// like no other's.
func attnBackend(cfg Config) string { return "KVFERRY_" + strings.ToUpper(cfg.Keys.String()) + "_KEYS" }

// rankWorker is the WorkerHalf as the loop uses it.
type rankWorker interface {
	Submit(connector.StepMeta)
	Stepped()
	Outputs() <-chan connector.WorkerOutput
	Close() error
}

// parts is what an engine is put together from, below its loop.
type parts struct {
	half     *scheduler.Half // the machine's; only the loop calls it
	worker   rankWorker
	cache    *model.Cache
	listener *peer.Listener
	told     atomic.Pointer[worker.Worker] // of what the listener is asked
	peerSet  *peerSet
	tier     *tierParts // nil: there is no CPU tier
	host     string     // by which peers reach the side channel
	port     int
}

// asked tells the worker that our side channel was asked; before it is there, nobody waits for anything.
func (p *parts) asked() {
	if w := p.told.Load(); w != nil {
		w.Asked()
	}
}

// assemble builds everything from the memory up. When it fails, it leaves nothing behind.
func assemble(cfg Config) (p *parts, err error) {
	var undo []func() error
	defer func() {
		if err != nil {
			for i := len(undo) - 1; i >= 0; i-- {
				_ = undo[i]()
			}
			p = nil
		}
	}()
	p = &parts{peerSet: newPeerSet()}
	events := event.Tee(cfg.Events, p.peerSet)
	ended, end := context.WithCancel(context.Background()) // nothing is waited for when this fails
	end()

	ag, err := newAgent(cfg)
	if err != nil {
		return nil, cfg.listenError(AgentAddress, cfg.AgentListen, err)
	}
	undo = append(undo, ag.Close)
	shape := cfg.Model.Config()
	mem, err := ag.Alloc(model.CacheBytes(shape, cfg.BlockSize, cfg.NumBlocks))
	if err != nil {
		return nil, fmt.Errorf("KV cache of %d blocks: %w", cfg.NumBlocks, err)
	}
	lay := model.CacheShape{Layout: cfg.Layout, Keys: cfg.Keys, BlockSize: cfg.BlockSize, NumBlocks: cfg.NumBlocks}
	if p.cache, err = model.NewCache(shape, lay, mem.Bytes()); err != nil {
		return nil, err
	}

	if cfg.Tier.on() {
		if p.tier, err = newTier(cfg, p.cache); err != nil {
			return nil, err
		}
		undo = append(undo, func() error { return p.tier.close(ended) })
	}

	side, err := cfg.ofRank(cfg.SideChannel)
	if err != nil {
		return nil, err
	}
	ln, err := peer.Listen(side)
	if err != nil {
		return nil, cfg.listenError(SideChannelAddress, cfg.SideChannel, err)
	}
	p.host, p.port = cfg.AdvertiseHost, ln.Addr().(*net.TCPAddr).Port
	if p.host == "" {
		p.host = hostOf(ln.Addr().(*net.TCPAddr))
	}
	if p.listener, err = peer.NewListener(ln, peer.ListenerConfig{Events: events, Asked: p.asked}); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	undo = append(undo, p.listener.Close)

	layout, hash, err := p.announce(cfg, ag)
	if err != nil {
		return nil, err
	}
	table, err := peer.NewTable(peer.Config{
		Agent: ag, Self: cfg.EngineID, Hash: hash, EnforceHash: !cfg.AnyCompat, Contents: attnBackend(cfg), TTL: cfg.EngineTTL,
		LocalFactors: string(factors(cfg).Canonical(cfg.ConnectorVersion)), NearHashes: nearHashes(cfg), Events: events,
	})
	if err != nil {
		return nil, err
	}
	undo = append(undo, func() error { table.Close(); return nil })
	if p.half, err = scheduler.New(scheduler.Config{
		Engine: cfg.EngineID, Host: p.host, Port: p.port, TP: tpSize, PP: ppSize, Role: cfg.Role, Mode: cfg.Mode, BlockSize: cfg.BlockSize,
		Lease: cfg.Lease, RegistrationTimeout: cfg.RegistrationTimeout, Bidirectional: cfg.Bidirectional, DecoderBlocksTTL: cfg.DecoderBlocksTTL,
		Clock: peer.At, RecomputeThreshold: max(cfg.RecomputeThreshold, 0), Events: events,
	}); err != nil {
		return nil, err
	}
	// The worker owns agent and table from here on.
	w, err := worker.New(worker.Config{
		Engine: cfg.EngineID, Host: p.host, Port: p.port, TP: tpSize, PP: ppSize, Mode: cfg.Mode,
		Agent: ag, Peers: table, Layout: layout,
		Lease: cfg.Lease, RegistrationTimeout: cfg.RegistrationTimeout, TransferSilence: cfg.TransferSilence, Events: events,
	})
	if err != nil {
		return nil, err
	}
	p.worker = w
	p.told.Store(w)
	return p, nil
}

// announce tells the side channel's clients about the one rank.
func (p *parts) announce(cfg Config, ag agent.Agent) (geometry.Layout, string, error) {
	m := metadata(cfg, p.cache.Regions(), ag)
	blob, err := wire.AppendAgentMetadata(nil, m, cfg.ConnectorVersion)
	if err != nil {
		return geometry.Layout{}, "", err
	}
	layout, err := geometry.FromMetadata(m, tpSize, ppSize)
	if err != nil {
		return geometry.Layout{}, "", err
	}
	hash := factors(cfg).Hash(cfg.ConnectorVersion)
	payload := wire.AppendHandshakePayload(nil, wire.HandshakePayload{CompatibilityHash: hash, AgentMetadata: blob})
	return layout, hash, p.listener.Set(kv.Rank{}, 1, payload)
}

func metadata(cfg Config, regions []kv.Region, ag agent.Agent) *wire.AgentMetadata {
	m := &wire.AgentMetadata{
		EngineID: cfg.EngineID, AgentMetadata: []byte{}, NumBlocks: cfg.NumBlocks, BlockSize: cfg.BlockSize,
		KVCacheLayout: cfg.Layout.String(), AttnBackendName: attnBackend(cfg), PhysicalBlocksPerLogical: 1, DCPSize: 1, PCPSize: 1,
		Extension: &wire.Extension{
			Version: wire.ExtensionVersion, Instance: newUUID(), HostID: choose.HostID(), Capabilities: worker.Capabilities(),
		},
	}
	for _, r := range regions {
		m.KVCachesBaseAddr = append(m.KVCachesBaseAddr, r.Base)
		m.BlockLens = append(m.BlockLens, int(r.BlockLen))
		m.BlockStrides = append(m.BlockStrides, int(r.Stride))
		m.RegionNumBlocks = append(m.RegionNumBlocks, r.NumBlocks)
		m.RegionGroupIDs = append(m.RegionGroupIDs, r.Group)
		m.RegionNames = append(m.RegionNames, r.Name)
		m.RegionMemTypes = append(m.RegionMemTypes, "DRAM")
	}
	for _, o := range ag.Offers() {
		m.Extension.Agents = append(m.Extension.Agents, wire.AgentOffer{Transport: o.Transport, Blob: o.Blob})
	}
	return m
}

func factors(cfg Config) wire.CompatFactors {
	shape := cfg.Model.Config()
	return wire.CompatFactors{
		VLLMVersion: cfg.VLLMVersion, Model: cfg.ServedName, DType: modelDType, NumKVHeads: shape.KVHeads, HeadSize: shape.HeadDim,
		NumHiddenLayers: shape.Layers, AttnBackendName: attnBackend(cfg), CacheDType: cacheDType, TransferMode: cfg.Mode,
	}
}

// nearHashes are the compatibility hashes of engines like this one but for one setting, and what to say
// of that.
func nearHashes(cfg Config) map[string]string {
	near := map[string]string{}
	other := cfg
	if other.Mode = kv.Push; cfg.Mode == kv.Push {
		other.Mode = kv.Pull
	}
	near[factors(other).Hash(cfg.ConnectorVersion)] = fmt.Sprintf(
		"its transfer mode is %s, ours (engine %q) is %s; start both with the same --mode, or use the %s connector on both sides",
		other.Mode, cfg.EngineID, cfg.Mode, cfg.Mode)
	other = cfg
	if other.Keys = model.PlainKeys; cfg.Keys == model.PlainKeys {
		other.Keys = model.RotatedKeys
	}
	near[factors(other).Hash(cfg.ConnectorVersion)] = fmt.Sprintf(
		"its cache keeps %v keys, ours (engine %q) %v ones; start both with the same --keys", other.Keys, cfg.EngineID, cfg.Keys)
	for v := 12; v <= 14; v++ {
		if v != cfg.ConnectorVersion {
			near[factors(cfg).Hash(v)] = fmt.Sprintf("its NIXL connector version is %d, ours is %d; start this engine with --connector-version %d",
				v, cfg.ConnectorVersion, v)
		}
	}
	return near
}

func (p *parts) coordinates(cfg Config) Coordinates {
	return Coordinates{
		EngineID: cfg.EngineID, Host: p.host, Port: p.port, TPSize: tpSize, PPSize: ppSize,
		TransferMode: cfg.Mode, BlockSize: cfg.BlockSize, Model: cfg.ServedName, Role: cfg.Role,
		P2PAddress: p.p2pAddress(),
	}
}

func (p *parts) peers() int { return p.peerSet.len() }

// p2pAddress is the "host:port" at which peers ask for blocks of the CPU tier; "" if they cannot.
func (p *parts) p2pAddress() string {
	if p.tier == nil {
		return ""
	}
	return p.tier.name
}

// close ends the CPU tier, which until ctx ends may keep what it was given, then the worker, which takes the agent, its memory and the peer table with it, and then the
// side channel. Nobody may use the cache any more. What the worker still reports is of no interest.
func (p *parts) close(ctx context.Context) error {
	tierErr := p.tier.close(ctx)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for range p.worker.Outputs() {
		}
	}()
	err := p.worker.Close()
	<-drained
	return errors.Join(tierErr, err, p.listener.Close())
}

// peerSet counts connected peer engines by the events of the table.
type peerSet struct {
	mu struct {
		sync.Mutex
		connected map[kv.Generation]struct{}
	}
}

func newPeerSet() *peerSet {
	s := new(peerSet)
	s.mu.connected = map[kv.Generation]struct{}{}
	return s
}

// Emit makes it a sink.
func (s *peerSet) Emit(e event.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch e := e.(type) {
	case event.HandshakeFinished:
		if e.Err == nil {
			s.mu.connected[e.Gen] = struct{}{}
		}
	case event.PeerGone:
		delete(s.mu.connected, e.Gen)
	}
}

func (s *peerSet) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.mu.connected)
}
