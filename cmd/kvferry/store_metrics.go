package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvferry/kvferry/tier/fs"
	"github.com/kvferry/kvferry/tier/store"
)

// storeCollector shows a store's counts at /metrics, for each namespace.
type storeCollector struct{ s *store.Store }

// storeMetric is one number of a namespace.
type storeMetric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(store.NamespaceStats) float64
}

const storePrefix = "kvferry_store_"

var storeRefusedDesc = prometheus.NewDesc(storePrefix+"peers_refused_total", "Connections of peers that were dropped.", nil, nil)

func storeMetricOf(kind prometheus.ValueType, name, help string, value func(store.NamespaceStats) float64) storeMetric {
	return storeMetric{prometheus.NewDesc(storePrefix+name, help, []string{"namespace"}, nil), kind, value}
}

func storeGauge(name, help string, value func(store.NamespaceStats) float64) storeMetric {
	return storeMetricOf(prometheus.GaugeValue, name, help, value)
}

func storeCounter(name, help string, value func(store.NamespaceStats) float64) storeMetric {
	return storeMetricOf(prometheus.CounterValue, name+"_total", help, value)
}

var storeMetrics = []storeMetric{
	storeGauge("peers", "Connected engines.", func(n store.NamespaceStats) float64 { return float64(n.Peers) }),
	storeGauge("block_bytes", "Length of a block.", func(n store.NamespaceStats) float64 { return float64(n.BlockLen) }),
	storeGauge("blocks_room", "Blocks that fit into memory.", func(n store.NamespaceStats) float64 { return float64(n.Slots) }),
	storeGauge("blocks", "Blocks in memory that can be had.", func(n store.NamespaceStats) float64 { return float64(n.Ready) }),
	storeGauge("blocks_pinned", "Blocks in memory that peers or files are using.", func(n store.NamespaceStats) float64 { return float64(n.Pinned) }),
	storeGauge("blocks_quarantined", "Blocks of memory that a failed transfer may still write.", func(n store.NamespaceStats) float64 { return float64(n.Quarantined) }),
	storeGauge("loads", "Fetches and reads of files under way.", func(n store.NamespaceStats) float64 { return float64(n.Loads) }),
	storeGauge("stores", "Writes of files under way or waiting.", func(n store.NamespaceStats) float64 { return float64(n.Stores) }),
	storeGauge("offers_waiting", "Offered blocks that wait for their fetch.", func(n store.NamespaceStats) float64 { return float64(n.Intake.Waiting) }),
	storeGauge("fetches", "Peers that are being fetched from.", func(n store.NamespaceStats) float64 { return float64(n.Intake.Batches) }),
	storeCounter("offers", "Blocks that engines have offered.", func(n store.NamespaceStats) float64 { return float64(n.Intake.Offered) }),
	storeCounter("offers_dropped", "Offered blocks that found their queue full, or whose engine went away.", func(n store.NamespaceStats) float64 { return float64(n.Intake.Dropped) }),
	storeCounter("blocks_evicted", "Blocks that left memory for others.", func(n store.NamespaceStats) float64 { return float64(n.Evicted) }),
	storeCounter("loads_failed", "Blocks that could not be fetched or read.", func(n store.NamespaceStats) float64 { return float64(n.FailedLoads) }),
}

// storeFileMetrics are of namespaces that have files.
var storeFileMetrics = []storeMetric{
	storeGauge("files", "Blocks in files.", files(func(f fs.Stats) float64 { return float64(f.Blocks) })),
	storeGauge("files_bytes", "Bytes of files, as the bound counts them.", files(func(f fs.Stats) float64 { return float64(f.Bytes) })),
	storeCounter("files_written", "Blocks written to files.", files(func(f fs.Stats) float64 { return float64(f.Stores) })),
	storeCounter("files_read", "Blocks read from files.", files(func(f fs.Stats) float64 { return float64(f.Loads) })),
	storeCounter("files_not_written", "Blocks that could not be written.", files(func(f fs.Stats) float64 { return float64(f.NotStored) })),
	storeCounter("files_dropped", "Files that were unusable when they were to be read.", files(func(f fs.Stats) float64 { return float64(f.Dropped) })),
	storeCounter("files_evicted", "Files removed for others.", files(func(f fs.Stats) float64 { return float64(f.Evicted) })),
}

func files(value func(fs.Stats) float64) func(store.NamespaceStats) float64 {
	return func(n store.NamespaceStats) float64 { return value(*n.Files) }
}

// Describe is a prometheus.Collector's.
func (storeCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- storeRefusedDesc
	for _, m := range storeMetrics {
		ch <- m.desc
	}
	for _, m := range storeFileMetrics {
		ch <- m.desc
	}
}

// Collect is a prometheus.Collector's.
func (c storeCollector) Collect(ch chan<- prometheus.Metric) {
	stats := c.s.Stats()
	ch <- prometheus.MustNewConstMetric(storeRefusedDesc, prometheus.CounterValue, float64(stats.Refused))
	for _, n := range stats.Namespaces {
		all := storeMetrics
		if n.Files != nil {
			all = append(all[:len(all):len(all)], storeFileMetrics...)
		}
		for _, m := range all {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(n), n.Facts.ID())
		}
	}
}
