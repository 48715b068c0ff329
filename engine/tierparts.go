package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/choose"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/fs"
	"github.com/kvferry/kvferry/tier/p2p"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// tierParts is the CPU tier of an engine, from its memory up.
type tierParts struct {
	*tierDriver
	blockLen int
	memory   []byte
	unmap    func() error // gives the memory back, when nothing uses it any more
	agent    agent.Agent  // nil: there is no tier of peers
	base     uint64       // address of memory; 0 without an agent
	name     string       // under which peers reach this engine; "" likewise
	listener net.Listener // of the tier of peers, which closes it
	files    *fs.Tier     // nil: there are no files
	peers    *p2p.Tier    // nil: there is no tier of peers
}

// newTier builds what Config.Tier asks for over a KV cache. When it fails, it leaves nothing behind.
func newTier(cfg Config, cache *model.Cache) (_ *tierParts, err error) {
	facts := cfg.TierFacts()
	t := &tierParts{tierDriver: newTierDriver(cfg.BlockSize, cfg.Log), blockLen: facts.BlockLen}
	if err := t.takeMemory(cfg); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			if t.listener != nil {
				_ = t.listener.Close() // if nobody has taken it over
			}
			err = errors.Join(err, t.unmap())
		}
	}()
	var tiers []tier.Secondary
	for _, name := range cfg.Tier.Secondaries {
		var s tier.Secondary
		switch name {
		case TierFS:
			s, err = t.newFiles(cfg, facts)
		case TierP2P:
			s, err = t.newPeers(cfg, facts)
		}
		if err != nil {
			return nil, err
		}
		tiers = append(tiers, s)
	}
	watched := watchTiers(tiers, t.blockLen)
	for i, w := range watched {
		tiers[i] = w
	}
	m, err := tier.New(tier.Config{Memory: t.memory, BlockLen: t.blockLen, Secondaries: tiers, OnChange: t.onChange,
		VerifyUse: true, InjectFault: cfg.Tier.InjectFault})
	if err != nil {
		return nil, err
	}
	t.logRecovery()
	t.start(m, watched, cache)
	return t, nil
}

// takeMemory maps the blocks' memory: an agent's, if peers are to have it.
func (t *tierParts) takeMemory(cfg Config) error {
	size := int(cfg.Tier.Memory / int64(t.blockLen) * int64(t.blockLen))
	if !cfg.Tier.has(TierP2P) {
		mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return fmt.Errorf("CPU cache of %d bytes: %w", size, err)
		}
		t.memory, t.unmap = mem, func() error { return unix.Munmap(mem) }
		return nil
	}
	ag, err := newAgent(cfg.tierAgent())
	if err != nil {
		return cfg.listenError(P2PAgentListenAddress, cfg.Tier.P2PAgentListen, err)
	}
	mem, err := ag.Alloc(size)
	if err != nil {
		return errors.Join(fmt.Errorf("CPU cache of %d bytes: %w", size, err), ag.Close())
	}
	t.agent, t.memory, t.base, t.unmap = ag, mem.Bytes(), mem.Addr(), ag.Close
	return nil
}

// tierAgent is the configuration of the agent that moves blocks of the CPU tier: a second one, as each
// has one reader of its events.
func (c Config) tierAgent() Config {
	c.EngineID += "/tier"
	c.AgentListen, c.AgentAdvertise = c.Tier.P2PAgentListen, ""
	if host := c.Tier.P2PAdvertise; host != "" {
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		c.AgentAdvertise = host
	}
	return c
}

func (t *tierParts) newFiles(cfg Config, facts TierFacts) (*fs.Tier, error) {
	f, err := fs.New(fs.Config{
		Root: cfg.Tier.FSDir, Facts: facts.Files, BlockLen: t.blockLen, Budget: cfg.Tier.FSBudget,
		OnDropped: func(d fs.Dropped) {
			cfg.Log.Warn("a file of the CPU tier was unusable and is removed", slog.String("file", d.Path), slog.Any("reason", d.Reason))
		},
	})
	t.files = f
	return f, err
}

func (t *tierParts) newPeers(cfg Config, facts TierFacts) (*p2p.Tier, error) {
	listen, err := cfg.ofRank(cfg.Tier.P2PListen)
	if err != nil {
		return nil, fmt.Errorf("p2p tier: %w", err)
	}
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, cfg.listenError(P2PListenAddress, cfg.Tier.P2PListen, fmt.Errorf("p2p tier: %w", err))
	}
	t.listener = ln
	t.name = cfg.p2pName(ln.Addr().(*net.TCPAddr))
	pc := p2p.Config{
		Listener: ln, Name: t.name, Agent: t.agent, Base: t.base, Blocks: len(t.memory) / t.blockLen, BlockLen: t.blockLen,
		Fingerprint: facts.Fingerprint, HashSeed: facts.HashSeed, Instance: newUUID(), HostID: choose.HostID(), Store: cfg.Tier.P2PStore,
		Events: cfg.Events,
		OnNote: func(n session.Note) {
			cfg.Log.Debug("CPU tier peer", slog.String("what", n.What), slog.String("peer", string(n.Peer)), slog.String("text", n.Text))
		},
	}
	if cfg.Tier.p2p != nil {
		cfg.Tier.p2p(&pc)
	}
	t.peers, err = p2p.New(pc)
	return t.peers, err
}

// logRecovery says what the file tier has found.
func (t *tierParts) logRecovery() {
	if t.files == nil {
		return
	}
	r := t.files.Recovery()
	t.log.Info("CPU tier files", slog.Int("blocks", r.Blocks), slog.Int64("bytes", r.Bytes),
		slog.Int("dropped", r.DroppedAll), slog.Int("foreign", r.ForeignAll))
	for _, d := range r.Dropped {
		t.log.Warn("a file of the CPU tier is not served", slog.String("file", d.Path), slog.Any("reason", d.Reason))
	}
}

// close ends the tier. Nobody uses the KV cache for it afterwards. A nil one has nothing to end.
func (t *tierParts) close(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return errors.Join(t.tierDriver.close(ctx), t.unmap())
}

// news is where the loop hears of the tier; never, if there is none.
func (t *tierParts) news() <-chan struct{} {
	if t == nil {
		return nil
	}
	return t.events.wake
}
