package api

import (
	"cmp"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvferry/kvferry/engine"
)

const prefix = "kvferry_engine_"

// metrics are the engine's, in a registry of their own: its Stats, read when somebody asks, and what
// this server sees of requests.
type metrics struct {
	registry      *prometheus.Registry
	http          *prometheus.CounterVec // by path, status
	firstToken    prometheus.Histogram
	total         prometheus.Histogram
	receivedBytes prometheus.Counter
	receivedTime  prometheus.Histogram
	receiveWait   prometheus.Histogram
}

var (
	requestBuckets  = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}
	transferBuckets = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5}
)

func newMetrics(e backend, inFlight *atomic.Int64) *metrics {
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: prefix + name, Help: help, Buckets: buckets})
	}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		http: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: prefix + "http_requests_total", Help: "HTTP requests by path and status; 499: the client left.",
		}, []string{"path", "status"}),
		firstToken: histogram("first_token_seconds", "HTTP request to first token.", requestBuckets),
		total:      histogram("request_seconds", "HTTP request to the end of an answer.", requestBuckets),
		receivedBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "received_bytes_total", Help: "KV bytes that came from peers.",
		}),
		receivedTime: histogram("receive_seconds", "First to last byte of a request's KV from a peer.", transferBuckets),
		receiveWait:  histogram("receive_wait_seconds", "Registration with a peer to the last byte.", requestBuckets),
	}
	inFlightGauge := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: prefix + "http_inflight", Help: "Completion requests at this moment.",
	}, func() float64 { return float64(inFlight.Load()) })
	m.registry.MustRegister(m.http, m.firstToken, m.total, m.receivedBytes, m.receivedTime, m.receiveWait, inFlightGauge, statsCollector{e}, tierCollector{e},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// served counts an HTTP request by its route, which is bounded, not by its path, which is not.
func (m *metrics) served(pattern string, status int) {
	m.http.WithLabelValues(cmp.Or(pattern, "/"), strconv.Itoa(status)).Inc()
}

func (m *metrics) finished(end *engine.Output, took time.Duration) {
	m.total.Observe(took.Seconds())
	if t := end.Transfer; t.Blocks > 0 {
		m.receivedBytes.Add(float64(t.Bytes))
		m.receivedTime.Observe(t.Took.Seconds())
		m.receiveWait.Observe(t.Waited.Seconds())
	}
}

// statsCollector reads an engine's Stats at the time of asking: an idle engine does nothing for its
// metrics.
type statsCollector struct{ e backend }

type stat struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*engine.Stats) float64
}

func newStat(kind prometheus.ValueType, name, help string, value func(*engine.Stats) float64) stat {
	return stat{prometheus.NewDesc(prefix+name, help, nil, nil), kind, value}
}

var stats = []stat{
	newStat(prometheus.GaugeValue, "blocks_free", "KV blocks that nothing uses; cached ones included.", func(s *engine.Stats) float64 { return float64(s.BlocksFree) }),
	newStat(prometheus.GaugeValue, "blocks_total", "KV blocks in all.", func(s *engine.Stats) float64 { return float64(s.BlocksTotal) }),
	newStat(prometheus.GaugeValue, "blocks_cached", "KV blocks that the prefix cache can give out.", func(s *engine.Stats) float64 { return float64(s.BlocksCached) }),
	newStat(prometheus.GaugeValue, "requests_running", "Requests in the batch.", func(s *engine.Stats) float64 { return float64(s.Running) }),
	newStat(prometheus.GaugeValue, "requests_waiting", "Requests that are queued, preempted or ready.", func(s *engine.Stats) float64 { return float64(s.Waiting) }),
	newStat(prometheus.GaugeValue, "requests_waiting_for_remote_kv", "Requests whose KV is on its way from a peer.", func(s *engine.Stats) float64 { return float64(s.WaitingRemote) }),
	newStat(prometheus.GaugeValue, "requests_held", "Ended requests whose blocks are kept for a peer.", func(s *engine.Stats) float64 { return float64(s.Held) }),
	newStat(prometheus.GaugeValue, "peers", "Connected peer engines.", func(s *engine.Stats) float64 { return float64(s.Peers) }),
	newStat(prometheus.GaugeValue, "requests_looking", "Requests that wait for the CPU tier to say or bring what it has.", func(s *engine.Stats) float64 { return float64(s.TierLooking) }),
	newStat(prometheus.GaugeValue, "requests_loading", "Requests whose KV is being copied out of the CPU tier.", func(s *engine.Stats) float64 { return float64(s.TierLoading) }),
	newStat(prometheus.CounterValue, "tier_query_tokens_total", "Prompt tokens that the CPU tier was asked for.", func(s *engine.Stats) float64 { return float64(s.TierQueries) }),
	newStat(prometheus.CounterValue, "tier_loaded_tokens_total", "Tokens whose KV came out of the CPU tier.", func(s *engine.Stats) float64 { return float64(s.TierTokens) }),
	newStat(prometheus.CounterValue, "tier_short_tokens_total", "Tokens whose KV the CPU tier was said to have and did not bring.", func(s *engine.Stats) float64 { return float64(s.TierShort) }),
	newStat(prometheus.CounterValue, "tier_stored_tokens_total", "Tokens whose KV the CPU tier was given.", func(s *engine.Stats) float64 { return float64(s.TierStored) }),
	newStat(prometheus.CounterValue, "tier_timeouts_total", "Requests that the CPU tier did not answer in time, and that were computed.", func(s *engine.Stats) float64 { return float64(s.TierTimeouts) }),
	newStat(prometheus.CounterValue, "steps_total", "Model steps.", func(s *engine.Stats) float64 { return float64(s.Steps) }),
	newStat(prometheus.CounterValue, "prompt_tokens_total", "Prompt tokens of admitted requests.", func(s *engine.Stats) float64 { return float64(s.PromptTokens) }),
	newStat(prometheus.CounterValue, "computed_prompt_tokens_total", "Prompt positions computed here.", func(s *engine.Stats) float64 { return float64(s.ComputedPrompt) }),
	newStat(prometheus.CounterValue, "external_tokens_total", "Prompt tokens whose KV came from peers.", func(s *engine.Stats) float64 { return float64(s.ExternalTokens) }),
	newStat(prometheus.CounterValue, "generated_tokens_total", "Tokens sampled.", func(s *engine.Stats) float64 { return float64(s.CompletionTokens) }),
	newStat(prometheus.CounterValue, "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", func(s *engine.Stats) float64 { return float64(s.PrefixQueries) }),
	newStat(prometheus.CounterValue, "prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", func(s *engine.Stats) float64 { return float64(s.PrefixHits) }),
	newStat(prometheus.CounterValue, "preemptions_total", "Requests that lost their blocks to older ones.", func(s *engine.Stats) float64 { return float64(s.Preemptions) }),
	newStat(prometheus.CounterValue, "received_total", "Requests whose KV came from a peer.", func(s *engine.Stats) float64 { return float64(s.Received) }),
	newStat(prometheus.CounterValue, "receive_failures_total", "Requests whose KV did not come.", func(s *engine.Stats) float64 { return float64(s.ReceiveFailed) }),
	newStat(prometheus.CounterValue, "recomputed_total", "Requests whose KV did not come and was computed here instead.", func(s *engine.Stats) float64 { return float64(s.Recomputed) }),
	newStat(prometheus.CounterValue, "unparked_total", "Requests that waited for KV and were given up because others needed their blocks.", func(s *engine.Stats) float64 { return float64(s.Unparked) }),
	newStat(prometheus.CounterValue, "turns_kept_total", "Ended requests whose blocks were kept for the next turn of their conversations.", func(s *engine.Stats) float64 { return float64(s.TurnsKept) }),
	newStat(prometheus.CounterValue, "turns_reclaimed_total", "Those of them that made way for others before the next turn.", func(s *engine.Stats) float64 { return float64(s.TurnsReclaimed) }),
	newStat(prometheus.CounterValue, "prefix_cache_resets_total", "Resets of the prefix cache.", func(s *engine.Stats) float64 { return float64(s.CacheResets) }),
}

var (
	finishedDesc = prometheus.NewDesc(prefix+"requests_finished_total", "Ended requests by reason.", []string{"reason"}, nil)
	refusedDesc  = prometheus.NewDesc(prefix+"requests_refused_total", "Requests that were not admitted, by kind.", []string{"kind"}, nil)
)

func (statsCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, s := range stats {
		ch <- s.desc
	}
	ch <- finishedDesc
	ch <- refusedDesc
}

func (c statsCollector) Collect(ch chan<- prometheus.Metric) {
	now := c.e.Stats()
	for _, s := range stats {
		ch <- prometheus.MustNewConstMetric(s.desc, s.kind, s.value(&now))
	}
	for reason, n := range now.Finished {
		ch <- prometheus.MustNewConstMetric(finishedDesc, prometheus.CounterValue, float64(n), string(reason))
	}
	for kind, n := range now.Refused {
		ch <- prometheus.MustNewConstMetric(refusedDesc, prometheus.CounterValue, float64(n), string(kind))
	}
}
