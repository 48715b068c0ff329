// Package metrics counts what a connector does, for Prometheus.
//
//	peer, connector ── events ──> Metrics ──┬── vllm:nixl_…          (names, labels, buckets of stock engines)
//	                                        └── kvferry_connector_…  (what those leave out)
//
// The stock names are those of nixl-connector.md, section 10, so that dashboards made for stock engines show
// kvferry ones too: a transfer is observed where it was posted, on P in push and on D in pull.
//
// # One fault, one failure
//
// kvferry_connector_failures_total counts causes, by kind: of all that an engine reports about one fault, one event
// moves it, and by one. What follows from a fault (a receive that fails because its handshake did, a lease that is
// given back) is in the counters of outcomes. The stock counters keep the stock's meaning instead:
// vllm:nixl_num_failed_transfers_total is the sum of failed transfers, handshakes and notifications.
//
// A Metrics may be used from any goroutine and waits for nothing.
package metrics
