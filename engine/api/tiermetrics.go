package api

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvferry/kvferry/engine"
)

// tierCollector reads the CPU tier's counts at the time of asking, under stock's names where those
// mean the same (p2p-tier.md, section 10), and our own. An engine without a tier shows none.
type tierCollector struct{ e backend }

const (
	tierPrefix  = "kvferry_tier_"
	stockPrefix = "vllm:kv_offload_tiering_"
	primaryTier = "0:primary"
)

// memoryStat is one count of the CPU's memory.
type memoryStat struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*engine.TierStats) float64
}

func newMemoryStat(kind prometheus.ValueType, name, help string, value func(*engine.TierStats) float64) memoryStat {
	return memoryStat{prometheus.NewDesc(tierPrefix+name, help, nil, nil), kind, value}
}

const (
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

var memoryStats = []memoryStat{
	newMemoryStat(gauge, "blocks_total", "Blocks that the CPU tier's memory has room for.", func(s *engine.TierStats) float64 { return float64(s.Memory.Slots) }),
	newMemoryStat(gauge, "blocks_free", "Blocks of it without content.", func(s *engine.TierStats) float64 { return float64(s.Memory.Free) }),
	newMemoryStat(gauge, "blocks_ready", "Blocks of it that can be given out.", func(s *engine.TierStats) float64 { return float64(s.Memory.Ready) }),
	newMemoryStat(gauge, "blocks_writing", "Blocks of it that are being filled.", func(s *engine.TierStats) float64 { return float64(s.Memory.Writing) }),
	newMemoryStat(gauge, "blocks_pinned", "Ready blocks that somebody reads.", func(s *engine.TierStats) float64 { return float64(s.Memory.Pinned) }),
	newMemoryStat(gauge, "blocks_quarantined", "Blocks that a peer may still write although their load has failed.", func(s *engine.TierStats) float64 { return float64(s.Memory.Quarantined) }),
	newMemoryStat(gauge, "peer_pins", "Blocks kept for peers that have looked them up.", func(s *engine.TierStats) float64 { return float64(s.Memory.PeerPins) }),
	newMemoryStat(gauge, "block_bytes", "Bytes of one block.", func(s *engine.TierStats) float64 { return float64(s.BlockLen) }),
	newMemoryStat(counter, "evicted_blocks_total", "Blocks that made room for others.", func(s *engine.TierStats) float64 { return float64(s.Memory.Evicted) }),
	newMemoryStat(counter, "not_stored_blocks_total", "Blocks of the KV cache that found no room.", func(s *engine.TierStats) float64 { return float64(s.NotStored) }),
	newMemoryStat(counter, "refused_pins_total", "Blocks that peers were not given because they hold their share.", func(s *engine.TierStats) float64 { return float64(s.Memory.RefusedPins) }),
	newMemoryStat(counter, "refused_stores_total", "Stores to a tier behind the memory that found its ledger full.", func(s *engine.TierStats) float64 { return float64(s.Memory.RefusedStores) }),
	newMemoryStat(counter, "strays_total", "Ends of jobs that had ended or never were: faults of a tier.", func(s *engine.TierStats) float64 { return float64(s.Memory.Strays) }),
}

// fileStats are shown when there are files.
var fileStats = []memoryStat{
	newMemoryStat(gauge, "fs_blocks", "Blocks in files.", func(s *engine.TierStats) float64 { return float64(s.Files.Blocks) }),
	newMemoryStat(gauge, "fs_bytes", "Bytes of them.", func(s *engine.TierStats) float64 { return float64(s.Files.Bytes) }),
	newMemoryStat(counter, "fs_not_stored_blocks_total", "Blocks that were not written.", func(s *engine.TierStats) float64 { return float64(s.Files.NotStored) }),
	newMemoryStat(counter, "fs_dropped_total", "Files that were unusable when they were loaded.", func(s *engine.TierStats) float64 { return float64(s.Files.Dropped) }),
	newMemoryStat(counter, "fs_evicted_total", "Files that made room for others.", func(s *engine.TierStats) float64 { return float64(s.Files.Evicted) }),
	newMemoryStat(gauge, "fs_recovered_blocks", "Blocks that the start has found.", func(s *engine.TierStats) float64 { return float64(s.Recovered.Blocks) }),
	newMemoryStat(gauge, "fs_recovered_dropped", "Files that the start has removed: unfinished, torn, or beyond the budget.", func(s *engine.TierStats) float64 { return float64(s.Recovered.DroppedAll) }),
	newMemoryStat(gauge, "fs_recovered_foreign", "Files that the start did not know and has left alone.", func(s *engine.TierStats) float64 { return float64(s.Recovered.ForeignAll) }),
}

// peerStats are shown when there are peers.
var peerStats = []memoryStat{
	newMemoryStat(gauge, "p2p_sessions", "Peers that are connected or connecting.", func(s *engine.TierStats) float64 { return float64(s.Peers.Sessions) }),
	newMemoryStat(gauge, "p2p_sessions_open", "Peers that may fetch.", func(s *engine.TierStats) float64 { return float64(s.Peers.Open) }),
	newMemoryStat(counter, "p2p_lookups_total", "Lookups at peers.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.LookupsAsked) }),
	newMemoryStat(counter, "p2p_lookup_timeouts_total", "Lookups that a peer did not answer in time.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.LookupsTimedOut) }),
	newMemoryStat(counter, "p2p_fetches_total", "Fetches from peers that arrived.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.FetchesDone) }),
	newMemoryStat(counter, "p2p_fetch_failures_total", "Fetches from peers that did not.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.FetchesFailed) }),
	newMemoryStat(counter, "p2p_received_bytes_total", "Bytes of blocks from peers.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.BytesIn) }),
	newMemoryStat(counter, "p2p_served_total", "Fetches of peers that were answered whole.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.FetchesServed) }),
	newMemoryStat(counter, "p2p_serve_failures_total", "Fetches of peers that were not.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.FetchesRefused) }),
	newMemoryStat(counter, "p2p_sent_bytes_total", "Bytes of blocks to peers.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.BytesOut) }),
	newMemoryStat(counter, "p2p_damaged_blocks_total", "Blocks from peers that did not have their checksum, and were dropped.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.BlocksDamaged) }),
	newMemoryStat(counter, "p2p_unchecked_blocks_total", "Blocks from peers that came without a checksum.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.BlocksUnchecked) }),
	newMemoryStat(counter, "p2p_protocol_errors_total", "Messages that break the protocol.", func(s *engine.TierStats) float64 { return float64(s.Peers.Total.ProtocolErrors) }),
}

var (
	peersEndedDesc   = prometheus.NewDesc(tierPrefix+"p2p_sessions_ended_total", "Ends of sessions with peers, by reason.", []string{"reason"}, nil)
	peersRefusedDesc = prometheus.NewDesc(tierPrefix+"p2p_refused_total", "Peers that got no session, by reason.", []string{"reason"}, nil)
)

// stockStat is one count of a tier, by stock's name.
type stockStat struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*engine.SecondaryStats) float64
}

func stockDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc(stockPrefix+name, help, []string{"tier"}, nil)
}

var stockStats = []stockStat{
	{stockDesc("chunk_queries", "Blocks that a tier was asked for."), counter, func(s *engine.SecondaryStats) float64 { return float64(s.Queries) }},
	{stockDesc("chunk_hits", "Blocks that it had."), counter, func(s *engine.SecondaryStats) float64 { return float64(s.Hits) }},
	{stockDesc("active_promotion_jobs", "Loads out of a tier under way."), gauge, func(s *engine.SecondaryStats) float64 { return float64(s.ActiveLoads) }},
	{stockDesc("active_cascade_jobs", "Stores to a tier under way."), gauge, func(s *engine.SecondaryStats) float64 { return float64(s.ActiveStores) }},
	{stockDesc("promotion_job_failures", "Loads that did not bring every block."), counter, func(s *engine.SecondaryStats) float64 { return float64(s.FailedLoads) }},
	{stockDesc("cascade_job_failures", "Stores that a tier did not keep, or that no peer has fetched."), counter, func(s *engine.SecondaryStats) float64 { return float64(s.FailedStores) }},
	{stockDesc("read_bytes", "Bytes that came out of a tier."), counter, func(s *engine.SecondaryStats) float64 { return float64(s.ReadBytes) }},
	{stockDesc("read_time", "Seconds that loads took, together."), counter, func(s *engine.SecondaryStats) float64 { return s.ReadSeconds }},
	{stockDesc("write_bytes", "Bytes that a tier has kept."), counter, func(s *engine.SecondaryStats) float64 { return float64(s.WrittenBytes) }},
	{stockDesc("write_time", "Seconds that stores took, together."), counter, func(s *engine.SecondaryStats) float64 { return s.WrittenSeconds }},
}

// Of the memory as a whole.
var (
	promotionRoomDesc = stockDesc("promotion_allocation_failures", "Blocks of a tier that found no room in the memory.")
	writeUsageDesc    = stockDesc("primary_write_usage_perc", "Share of the memory that is being written, 0 to 1.")
	readUsageDesc     = stockDesc("primary_read_usage_perc", "Share of the memory that is being read, 0 to 1.")
	lookupSyncDesc    = prometheus.NewDesc(stockPrefix+"lookup_sync_delay_seconds", "Time of one lookup.", nil, nil)
	lookupAsyncDesc   = prometheus.NewDesc(stockPrefix+"lookup_async_delay_seconds", "First lookup that was not decided to its decision, with what it brought.", nil, nil)
)

// Describe tells of every metric, also of those that this engine does not show.
func (tierCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, list := range [][]memoryStat{memoryStats, fileStats, peerStats} {
		for _, s := range list {
			ch <- s.desc
		}
	}
	for _, s := range stockStats {
		ch <- s.desc
	}
	for _, d := range []*prometheus.Desc{promotionRoomDesc, writeUsageDesc, readUsageDesc, lookupSyncDesc, lookupAsyncDesc,
		peersEndedDesc, peersRefusedDesc} {
		ch <- d
	}
}

// Collect reads everything once.
func (c tierCollector) Collect(ch chan<- prometheus.Metric) {
	s, ok := c.e.TierStats()
	if !ok {
		return
	}
	own := memoryStats
	if s.Files != nil {
		own = append(own[:len(own):len(own)], fileStats...)
	}
	if s.Peers != nil {
		own = append(own[:len(own):len(own)], peerStats...)
		for reason, n := range s.Peers.Ended {
			ch <- prometheus.MustNewConstMetric(peersEndedDesc, counter, float64(n), string(reason))
		}
		for reason, n := range s.Peers.Refused {
			ch <- prometheus.MustNewConstMetric(peersRefusedDesc, counter, float64(n), string(reason))
		}
	}
	for _, m := range own {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(&s))
	}
	memory := engine.SecondaryStats{Label: primaryTier, Queries: s.Memory.Hits + s.Memory.Misses, Hits: s.Memory.Hits}
	for i, t := range append([]engine.SecondaryStats{memory}, s.Tiers...) {
		for _, m := range stockStats {
			if i > 0 || m.desc == stockStats[0].desc || m.desc == stockStats[1].desc {
				ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(&t), t.Label)
			}
		}
	}
	share := func(blocks int) float64 { return float64(blocks) / float64(s.Memory.Slots) }
	ch <- prometheus.MustNewConstMetric(promotionRoomDesc, counter, float64(s.Memory.RefusedPromotions), primaryTier)
	ch <- prometheus.MustNewConstMetric(writeUsageDesc, gauge, share(s.Memory.Writing), primaryTier)
	ch <- prometheus.MustNewConstMetric(readUsageDesc, gauge, share(s.Memory.Pinned), primaryTier)
	ch <- delayMetric(lookupSyncDesc, s.LookupSync)
	ch <- delayMetric(lookupAsyncDesc, s.LookupAsync)
}

func delayMetric(desc *prometheus.Desc, d engine.Delays) prometheus.Metric {
	buckets, total := map[float64]uint64{}, uint64(0)
	for i, n := range d.Counts {
		total += n
		if i < len(engine.DelayBounds) {
			buckets[engine.DelayBounds[i]] = total
		}
	}
	return prometheus.MustNewConstHistogram(desc, total, d.Sum, buckets)
}
