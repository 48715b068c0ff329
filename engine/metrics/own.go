package metrics

import "github.com/prometheus/client_golang/prometheus"

// Kinds of failures.
const (
	failHandshake    = "handshake"            // a peer could not be connected
	failTransfer     = "transfer"             // a READ or WRITE could not be posted or did not end well
	failNotification = "notification"         // a message could not be sent
	failStray        = "notification_dropped" // a message came that nobody waits for, or that cannot be read
	failLease        = "lease_expired"        // a prompt's KV was not fetched in time
	failReceive      = "receive"              // KV did not come, and this engine has seen no cause
)

var failureKinds = []string{failHandshake, failTransfer, failNotification, failStray, failLease, failReceive}

// timeBuckets are for waits that end within a request's bound.
var timeBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}

// own are the metrics that only kvferry has.
type own struct {
	failures      *prometheus.CounterVec // by kind
	handshakes    *prometheus.CounterVec // by result
	handshakeTime prometheus.Histogram
	peers         prometheus.Gauge
	registrations *prometheus.CounterVec // by what became of them
	matches       *prometheus.CounterVec // by what they were matched with
	transfers     *prometheus.CounterVec // by result
	bytes         *prometheus.CounterVec // by direction
	receives      *prometheus.CounterVec // by phase
	receiveWait   prometheus.Histogram
	leases        *prometheus.CounterVec // by how they ended
	leasesHeld    prometheus.Gauge
	refused       prometheus.Counter
	claims        *prometheus.CounterVec // by what became of them
	cancels       *prometheus.CounterVec // by what
	extensions    prometheus.Counter
	grants        *prometheus.CounterVec // by what
	grantsHeld    prometheus.Gauge
	quarantined   prometheus.Gauge // blocks
	quarantines   prometheus.Counter
	unsent        *prometheus.CounterVec // notifications by what
	events        *prometheus.CounterVec // by kind
}

func newOwn(labels prometheus.Labels) own {
	const prefix = "kvferry_connector_"
	counter := func(name, help string, by ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + name, Help: help, ConstLabels: labels}, by)
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + name, Help: help, ConstLabels: labels})
	}
	histogram := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: prefix + name, Help: help, ConstLabels: labels, Buckets: timeBuckets})
	}
	one := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + name, Help: help, ConstLabels: labels})
	}
	o := own{
		failures:      counter("failures_total", "Causes of failed hand-offs by kind; one fault moves one of them.", "kind"),
		handshakes:    counter("handshakes_total", "Handshakes with peers by result.", "result"),
		handshakeTime: histogram("handshake_seconds", "Duration of handshakes that went well."),
		peers:         gauge("peers", "Peer engines connected, by generation."),
		registrations: counter("registrations_total", "Registrations: sent by D; received, matched and dropped by P.", "what"),
		matches:       counter("registration_matches_total", "Registrations matched on P, by what they were matched with.", "by"),
		transfers:     counter("transfers_total", "Transfers of one rank: posted, done, failed.", "result"),
		bytes:         counter("bytes_total", "KV bytes of transfers that are complete.", "direction"),
		receives:      counter("receives_total", "Receives on D: done, or the phase in which they failed.", "phase"),
		receiveWait:   histogram("receive_wait_seconds", "From asking for KV to having all of it."),
		leases:        counter("leases_ended_total", "Leases of P by how they ended.", "reason"),
		leasesHeld:    gauge("leases", "Finished requests whose blocks P keeps, on all ranks here."),
		refused:       one("leases_refused_total", "Finished requests whose blocks P did not keep."),
		claims:        counter("claims_total", "Claims of P's blocks in pull: sent by D; received and refused by P, and how they ended there: read, cancelled, unread.", "what"),
		cancels:       counter("cancels_total", "Cancels: sent by D, received by P.", "what"),
		extensions:    one("lease_extensions_total", "Leases moved by a heartbeat."),
		grants:        counter("grants_total", "Permissions to write, in pull to read, a request's blocks: issued and revoked.", "what"),
		grantsHeld:    gauge("grants", "Permissions that peers have."),
		quarantined:   gauge("quarantined_blocks", "Blocks that a peer might still write after its receive has failed."),
		quarantines:   one("quarantines_total", "Receives whose blocks were put in quarantine."),
		unsent:        counter("unsent_notifications_total", "Notifications that could not be sent, heartbeats included.", "what"),
		events:        counter("events_total", "Events by kind.", "kind"),
	}
	for _, kind := range failureKinds { // so that a rate exists before the first failure
		o.failures.WithLabelValues(kind)
	}
	return o
}

func (o *own) collectors() []prometheus.Collector {
	return []prometheus.Collector{
		o.failures, o.handshakes, o.handshakeTime, o.peers, o.registrations, o.matches, o.transfers, o.bytes, o.receives, o.receiveWait,
		o.leases, o.leasesHeld, o.refused, o.claims, o.cancels, o.extensions, o.grants, o.grantsHeld, o.quarantined, o.quarantines, o.unsent, o.events,
	}
}
