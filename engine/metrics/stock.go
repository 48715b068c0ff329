package metrics

import "github.com/prometheus/client_golang/prometheus"

// Buckets of the stock histograms.
var (
	xferBuckets  = []float64{.005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5}
	postBuckets  = append([]float64{.001}, xferBuckets...)
	bytesBuckets = prometheus.ExponentialBuckets(1<<11, 4, 12) // 2^11, 2^13 … 2^33
	descBuckets  = []float64{10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000}
)

// stock are the metrics of a stock connector.
type stock struct {
	xferTime, postTime, bytes, descs                                     prometheus.Histogram
	failedTransfers, failedNotifications, expiredRequests, notifsTooLate prometheus.Counter
}

func newStock(labels prometheus.Labels) stock {
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: "vllm:nixl_" + name, Help: help, ConstLabels: labels, Buckets: buckets})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "vllm:nixl_" + name + "_total", Help: help, ConstLabels: labels})
	}
	return stock{
		xferTime:            histogram("xfer_time_seconds", "Duration of KV transfers that went well.", xferBuckets),
		postTime:            histogram("post_time_seconds", "Time to post a KV transfer that went well.", postBuckets),
		bytes:               histogram("bytes_transferred", "Bytes per KV transfer that went well.", bytesBuckets),
		descs:               histogram("num_descriptors", "Descriptors per KV transfer that went well.", descBuckets),
		failedTransfers:     counter("num_failed_transfers", "Failed transfers, handshakes and notifications."),
		failedNotifications: counter("num_failed_notifications", "Failed notifications, heartbeats left out."),
		expiredRequests:     counter("num_kv_expired_reqs", "Requests whose KV was given back when its lease ran out."),
		notifsTooLate:       counter("num_notifications_after_expiry", "Completions of requests that nobody waits for any more."),
	}
}

func (s *stock) collectors() []prometheus.Collector {
	return []prometheus.Collector{s.xferTime, s.postTime, s.bytes, s.descs, s.failedTransfers, s.failedNotifications, s.expiredRequests, s.notifsTooLate}
}
