package engine

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/p2p"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// The tiers behind the CPU's that TierConfig.Secondaries may name.
const (
	TierP2P = "p2p"
	TierFS  = "fs"
)

// DefaultHashSeed is what the block hashes of this engine begin with. It is no stock engine's: their
// hashes are other functions of the same tokens.
const DefaultHashSeed = "kvferry-sha256"

// TierConfig is the CPU tier of an engine: KV blocks in CPU memory, and what is behind it. The zero
// value means none. Other zero values mean the defaults in the comments.
type TierConfig struct {
	// Memory is for blocks, bytes. 0: there is no tier.
	Memory int64
	// Secondaries are the tiers behind the memory, in the order in which they are asked: TierP2P, TierFS.
	Secondaries []string
	// Timeout is how long a request waits for the tiers to say what they have, and to bring it into the
	// memory; then it is computed. Default 60 s.
	Timeout time.Duration
	// HashSeed enters every block hash: engines with different seeds share no blocks. Default:
	// DefaultHashSeed.
	HashSeed string

	// FSDir is the folder of TierFS; FSBudget bounds its files, bytes. Default 1 GiB.
	FSDir    string
	FSBudget int64

	// P2PListen is the HOST:PORT at which peers ask for blocks; port 0 picks a free one. Default
	// 127.0.0.1:0.
	P2PListen string
	// P2PAdvertise is the HOST or HOST:PORT under which peers know and reach P2PListen. Default:
	// P2PListen itself, or Config.AdvertiseHost if that is every interface.
	P2PAdvertise string
	// P2PAgentListen is the HOST:PORT of the transfer agent for blocks of peers. Default: P2PListen's
	// host and a free port.
	P2PAgentListen string

	// P2PStore is the "host:port" of a node that keeps blocks for others: it is offered every block that
	// is kept here, and asked for those of requests that name no source. Default: none.
	P2PStore string

	// InjectFault damages what is kept, one of the faults in turn per block: whoever is to get such a
	// block must find it missing. It is a self-test. tier.Unseen is what a missing checksum would do.
	InjectFault []tier.Fault

	p2p func(*p2p.Config) // of tests
}

// on tells whether there is a tier.
// list is names for people.
func list[S ~string](names []S) string {
	texts := make([]string, len(names))
	for i, n := range names {
		texts[i] = string(n)
	}
	return strings.Join(texts, ", ")
}

func (c TierConfig) on() bool { return c.Memory > 0 }

func (c TierConfig) has(name string) bool { return slices.Contains(c.Secondaries, name) }

func (c TierConfig) withDefaults() TierConfig {
	if c.Timeout == 0 {
		c.Timeout = 60 * time.Second
	}
	if c.HashSeed == "" {
		c.HashSeed = DefaultHashSeed
	}
	if c.FSBudget == 0 {
		c.FSBudget = 1 << 30
	}
	if c.P2PListen == "" {
		c.P2PListen = "127.0.0.1:0"
	}
	if c.P2PAgentListen == "" {
		if host, _, err := net.SplitHostPort(c.P2PListen); err == nil {
			c.P2PAgentListen = net.JoinHostPort(host, "0")
		}
	}
	return c
}

// validateTier reports everything in the tier's part of a Config, defaults included, that cannot work.
func (c Config) validateTier(bad func(format string, args ...any)) {
	t := c.Tier
	if !t.on() {
		switch {
		case t.Memory < 0:
			bad("CPU cache of %d bytes", t.Memory)
		case len(t.Secondaries) > 0:
			bad("tiers %s are behind the CPU cache, which is off: give it memory (--cpu-cache)", strings.Join(t.Secondaries, ","))
		case t.FSDir != "":
			bad("folder %q is behind the CPU cache, which is off: give it memory (--cpu-cache)", t.FSDir)
		case t.P2PStore != "":
			bad("store %q is behind the CPU cache, which is off: give it memory (--cpu-cache)", t.P2PStore)
		}
		return
	}
	if len(c.InjectKVFault) > 0 {
		bad("KV faults need the CPU cache to be off, or damaged blocks would be given to other requests")
	}
	if t.Timeout <= 0 {
		bad("tier timeout of %v is not positive", t.Timeout)
	}
	if c.BlockSize >= 1 && c.BlockSize <= model.MaxBlockSize {
		if n := tierBlockLen(c); t.Memory/int64(n) < 1 || t.Memory > MaxTierMemory {
			bad("CPU cache of %d bytes, must be %d (one block) to %d", t.Memory, n, int64(MaxTierMemory))
		}
	}
	for i, name := range t.Secondaries {
		switch {
		case name != TierP2P && name != TierFS:
			bad("tier %q is unknown, use %s or %s", name, TierP2P, TierFS)
		case slices.Contains(t.Secondaries[:i], name):
			bad("tier %s is named twice", name)
		}
	}
	switch {
	case t.has(TierFS) && t.FSDir == "":
		bad("tier %s has no folder: name one (--fs)", TierFS)
	case t.FSDir != "" && !t.has(TierFS):
		bad("folder %q is for tier %s, which is not asked for (--tier %s)", t.FSDir, TierFS, TierFS)
	}
	for _, f := range t.InjectFault {
		if f != tier.Unseen && !slices.Contains(tier.Faults, f) {
			bad("tier fault %q is unknown, use %s or %s", f, list(tier.Faults), tier.Unseen)
		}
	}
	if t.FSBudget < 0 {
		bad("file tier of %d bytes", t.FSBudget)
	}
	if t.P2PStore != "" && !t.has(TierP2P) {
		bad("store %s is reached by tier %s, which is off: ask for it (--tier %s)", t.P2PStore, TierP2P, TierP2P)
	}
	if t.has(TierP2P) {
		c.validateP2P(bad)
	}
}

func (c Config) validateP2P(bad func(format string, args ...any)) {
	t := c.Tier
	if t.P2PStore != "" {
		if _, err := session.ParsePeer(t.P2PStore); err != nil {
			bad("store: %v", err)
		}
	}
	for _, a := range []struct{ name, addr string }{{"p2p", t.P2PListen}, {"p2p agent", t.P2PAgentListen}} {
		host, _, err := net.SplitHostPort(a.addr)
		if err == nil {
			_, err = c.ofRank(a.addr)
		}
		switch {
		case err != nil:
			bad("%s address: %v, use HOST:PORT", a.name, err)
		case unspecified(host) && t.P2PAdvertise == "" && c.AdvertiseHost == "":
			bad("%s address %s is every interface; name the host by which peers reach it", a.name, a.addr)
		}
	}
}

// p2pName is the "host:port" under which peers know a listener.
func (c Config) p2pName(at *net.TCPAddr) string {
	if name, err := c.ofRank(c.Tier.P2PAdvertise); err == nil {
		return name
	}
	host, _, _ := net.SplitHostPort(c.Tier.P2PListen) // Validate has looked
	switch {
	case c.Tier.P2PAdvertise != "":
		host = kv.BareHost(c.Tier.P2PAdvertise)
	case unspecified(host):
		host = c.AdvertiseHost
	}
	return net.JoinHostPort(host, strconv.Itoa(at.Port))
}

// TierFacts is what two nodes must agree on to exchange blocks of the CPU tier.
type TierFacts struct {
	BlockLen    int    // bytes of one block, all layers
	Fingerprint string // p2p-tier.md, section 3.2
	HashSeed    string
	Files       string // fs.Config's Facts: those above and the weights
}

// TierFacts computes the facts of an engine of this configuration. It reads all weights.
func (c Config) TierFacts() TierFacts {
	c = c.withDefaults()
	shape, digest := c.Model.Config(), c.Model.Digest()
	layers := make([]string, shape.Layers)
	for i := range layers {
		layers[i] = fmt.Sprintf("model.layers.%d.self_attn.attn", i)
	}
	b, err := json.Marshal(map[string]any{ // sorted keys, no spaces
		"model_name": c.ServedName, "tokens_per_hash": c.BlockSize, "blocks_per_file": 1,
		"tp_size": tpSize, "pp_size": ppSize, "pcp_size": 1, "dcp_size": 1, "dtype": modelDType,
		"kv_cache_groups":  []map[string]any{{"tokens_per_block": c.BlockSize, "layer_names": layers}},
		"inference_engine": "kvferry",
		"attn_backend":     attnBackend(c), "block_layout": c.Layout.String(), "weights": hex.EncodeToString(digest[:]),
	})
	if err != nil {
		panic(err) // strings and numbers
	}
	sum := sha256.Sum256(b)
	return TierFacts{
		BlockLen: tierBlockLen(c), Fingerprint: hex.EncodeToString(sum[:])[:16], HashSeed: c.Tier.HashSeed,
		Files: string(b) + "\n" + c.Tier.HashSeed,
	}
}

// tierBlockLen is the length of one block of the tier: all layers of a KV block, one after the other.
func tierBlockLen(c Config) int { return model.CacheBytes(c.Model.Config(), c.BlockSize, 1) }
