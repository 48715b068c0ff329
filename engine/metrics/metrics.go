package metrics

import (
	"cmp"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
)

// Config names the engine whose events are counted.
type Config struct {
	// Model is the label model_name: what clients call the model.
	Model string
	// Engine is the label engine: as with stock engines, which of a server's engines it is. Default "0".
	Engine string
	// Mode tells whose bytes a transfer moves: in push those of its poster, in pull those of its peer.
	// Default: kv.Push.
	Mode kv.TransferMode
}

// Metrics counts events. It is a sink for a connector's events and a collector for a registry.
type Metrics struct {
	mode  kv.TransferMode
	stock stock
	own   own
	all   []prometheus.Collector
}

var (
	_ event.Sink           = (*Metrics)(nil)
	_ prometheus.Collector = (*Metrics)(nil)
)

// New is the metrics of an engine that has done nothing yet.
func New(cfg Config) *Metrics {
	labels := prometheus.Labels{"model_name": cfg.Model, "engine": cmp.Or(cfg.Engine, "0")}
	m := &Metrics{mode: cmp.Or(cfg.Mode, kv.Push), stock: newStock(labels), own: newOwn(labels)}
	m.all = append(m.stock.collectors(), m.own.collectors()...)
	return m
}

// Describe is a prometheus.Collector's.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all {
		c.Describe(ch)
	}
}

// Collect is a prometheus.Collector's.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all {
		c.Collect(ch)
	}
}

// Emit counts one event.
func (m *Metrics) Emit(e event.Event) {
	m.own.events.WithLabelValues(e.Kind()).Inc()
	switch e := e.(type) {
	case event.HandshakeFinished:
		m.handshake(e)
	case event.PeerGone:
		m.own.peers.Dec()
	case event.RegistrationSent:
		m.own.registrations.WithLabelValues("sent").Inc()
	case event.RegistrationReceived:
		m.own.registrations.WithLabelValues("received").Inc()
	case event.RegistrationMatched:
		m.own.registrations.WithLabelValues("matched").Inc()
		m.own.matches.WithLabelValues(known(e.By, "transfer_id", "id", "base_id")).Inc()
	case event.RegistrationDropped:
		m.own.registrations.WithLabelValues("dropped").Inc()
	case event.TransferPosted:
		m.own.transfers.WithLabelValues("posted").Inc()
	case event.TransferDone:
		m.transferDone(e)
	case event.TransferFailed:
		m.transferFailed(e)
	case event.ClaimSent:
		m.own.claims.WithLabelValues("sent").Inc()
	case event.ClaimReceived:
		m.own.claims.WithLabelValues("received").Inc()
	case event.ClaimRefused:
		m.own.claims.WithLabelValues("refused").Inc()
	case event.ClaimEnded:
		m.own.claims.WithLabelValues(known(e.How, "read", "cancelled", "unread")).Inc()
	case event.CancelSent:
		m.own.cancels.WithLabelValues("sent").Inc()
	case event.CancelReceived:
		m.own.cancels.WithLabelValues("received").Inc()
	case event.NotificationFailed:
		m.notificationFailed(e)
	case event.NotificationDropped:
		m.notificationDropped(e)
	case event.ReceiveFinished:
		m.own.receives.WithLabelValues("done").Inc()
		m.own.receiveWait.Observe(e.Waited.Seconds())
		if m.mode == kv.Push { // in pull the transfers have told
			m.own.bytes.WithLabelValues("received").Add(float64(e.Bytes))
		}
	case event.ReceiveFailed:
		m.receiveFailed(e)
	case event.ReceiveTimedOut:
		m.failed(failReceive)
	case event.LeaseTaken:
		m.own.leasesHeld.Inc()
	case event.LeaseRefused:
		m.own.refused.Inc()
	case event.LeaseExtended:
		m.own.extensions.Inc()
	case event.LeaseEnded:
		m.leaseEnded(e)
	case event.GrantIssued:
		m.own.grants.WithLabelValues("issued").Inc()
		m.own.grantsHeld.Inc()
	case event.GrantRevoked:
		m.own.grants.WithLabelValues("revoked").Inc()
		m.own.grantsHeld.Dec()
	case event.BlocksQuarantined:
		m.own.quarantines.Inc()
		m.own.quarantined.Add(float64(e.Blocks))
	case event.QuarantineEnded:
		m.own.quarantined.Sub(float64(e.Blocks))
	}
}

func (m *Metrics) failed(kind string) { m.own.failures.WithLabelValues(kind).Inc() }

func (m *Metrics) handshake(e event.HandshakeFinished) {
	if e.Err != nil {
		m.own.handshakes.WithLabelValues("failed").Inc()
		m.failed(failHandshake)
		m.stock.failedTransfers.Inc()
		return
	}
	m.own.handshakes.WithLabelValues("ok").Inc()
	m.own.handshakeTime.Observe(e.Took.Seconds())
	m.own.peers.Inc()
}

func (m *Metrics) transferDone(e event.TransferDone) {
	m.own.transfers.WithLabelValues("done").Inc()
	direction := "sent"
	if e.Op == event.Read {
		direction = "received"
	}
	m.own.bytes.WithLabelValues(direction).Add(float64(e.Bytes))
	m.stock.xferTime.Observe(e.Took.Seconds())
	m.stock.postTime.Observe(e.Post.Seconds())
	m.stock.bytes.Observe(float64(e.Bytes))
	m.stock.descs.Observe(float64(e.Descs))
}

// transferFailed leaves out transfers that there never were because the handshake failed, which has told, and
// those that nobody wanted any more.
func (m *Metrics) transferFailed(e event.TransferFailed) {
	m.own.transfers.WithLabelValues("failed").Inc()
	if e.GivenUp || e.Phase == string(connector.PhaseHandshake) {
		return
	}
	m.failed(failTransfer)
	m.stock.failedTransfers.Inc()
}

// notificationFailed leaves out heartbeats, as stock engines do: the next one repairs what one has missed.
func (m *Metrics) notificationFailed(e event.NotificationFailed) {
	m.own.unsent.WithLabelValues(e.What).Inc()
	if e.What == heartbeat || e.What == beat {
		return
	}
	m.failed(failNotification)
	m.stock.failedNotifications.Inc()
	m.stock.failedTransfers.Inc()
}

// What NotificationFailed and NotificationDropped call these.
const (
	heartbeat  = "heartbeat"
	beat       = "beat" // a heartbeat that kvferry engines answer
	completion = "completion"
)

func (m *Metrics) notificationDropped(e event.NotificationDropped) {
	m.failed(failStray)
	if e.What == completion {
		m.stock.notifsTooLate.Inc()
	}
}

// receiveFailed counts a cause only where this engine has told none before. A cancelled request is no
// failure; one that timed out has told so.
func (m *Metrics) receiveFailed(e event.ReceiveFailed) {
	m.own.receives.WithLabelValues(known(e.Phase, phases...)).Inc()
	switch {
	case e.Expired:
		m.failed(failLease)
		m.stock.expiredRequests.Inc()
	case !e.Told && e.Phase != string(connector.PhaseCancel):
		m.failed(failReceive)
	}
}

func (m *Metrics) leaseEnded(e event.LeaseEnded) {
	m.own.leasesHeld.Dec()
	m.own.leases.WithLabelValues(known(e.Reason, "sent", "expired", "failed", "cancelled", "released")).Inc()
	if e.Reason == "expired" {
		m.failed(failLease)
		m.stock.expiredRequests.Inc()
	}
}

var phases = []string{
	string(connector.PhaseParams), string(connector.PhaseHandshake), string(connector.PhaseRegistration), string(connector.PhasePrefill),
	string(connector.PhaseTransfer), string(connector.PhaseWait), string(connector.PhaseCancel), string(connector.PhaseLease), string(connector.PhaseLimit),
}

// known keeps a label's values few, whatever an event says.
func known(value string, values ...string) string {
	if slices.Contains(values, value) {
		return value
	}
	return "other"
}
