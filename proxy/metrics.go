package proxy

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvferry/kvferry/proxy/core"
)

// metrics are the router's own, in a registry of their own.
type metrics struct {
	registry *prometheus.Registry
	requests *prometheus.CounterVec // by path, route, status, outcome
	refusals *prometheus.CounterVec // by path, status
	legs     *prometheus.CounterVec // failed legs by leg, class
	cancels  *prometheus.CounterVec // by leg, cause
	retries  prometheus.Counter
	turns    *prometheus.CounterVec // by what became of them
	asked    *prometheus.CounterVec // coordinates by result
	releases *prometheus.CounterVec // of P's holds, by result
	phases   *prometheus.HistogramVec
}

var secondsBuckets = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}

func newMetrics(r *Router) *metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvferry_router_" + name, Help: help}, labels)
	}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		requests: counter("requests_total", "Requests that were sent to engines.", "path", "route", "status", "outcome"),
		refusals: counter("refused_total", "Requests that the router answered itself.", "path", "status"),
		legs:     counter("leg_failures_total", "Legs that failed, by what happened; client: the engine refused what the client asked for.", "leg", "class"),
		cancels:  counter("leg_cancels_total", "Legs that the router ended.", "leg", "cause"),
		retries: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kvferry_router_retried_legs_total", Help: "Legs of second attempts.",
		}),
		asked:    counter("coordinates_total", "Questions for a prefill engine's coordinates.", "result"),
		releases: counter("releases_total", "Holds that nobody will ask for, and that the router tells engines to let go: released, over (it had ended), failed, dropped (too many at a time).", "result"),
		turns:    counter("turns_total", "What decode engines keep of conversations: kept for the next turn, used by it, dropped.", "what"),
		phases: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvferry_router_phase_seconds", Help: "Phases of good requests. prefill: P's leg; decode_first_chunk: D's leg to the first piece of its stream; " +
				"handoff: P's answer to that piece; first_chunk: client's request to that piece; total: to the end of the answer.",
			Buckets: secondsBuckets,
		}, []string{"phase"}),
	}
	m.registry.MustRegister(m.requests, m.refusals, m.legs, m.cancels, m.retries, m.asked, m.releases, m.turns, m.phases, inFlight{r},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// What the router can see of where a request's time goes. A pair of legs is observed by prefill,
// decode_first_chunk and handoff, a client's request by the others.
const (
	phasePrefill     = "prefill"
	phaseDecodeFirst = "decode_first_chunk"
	phaseHandoff     = "handoff"
	phaseFirstChunk  = "first_chunk"
	phaseTotal       = "total"
)

func (m *metrics) phase(name string, d time.Duration) {
	m.phases.WithLabelValues(name).Observe(d.Seconds())
}

func (m *metrics) refused(api core.API, status int) {
	m.refusals.WithLabelValues(api.Path(), strconv.Itoa(status)).Inc()
}

// classClient is the class of a failure that is the client's own.
const classClient = "client"

func (m *metrics) legFailed(leg core.Leg, f *core.Failure) {
	class := string(f.Kind)
	if f.ByClient {
		class = classClient
	}
	m.legs.WithLabelValues(leg.String(), class).Inc()
}

func (m *metrics) cancelled(leg core.Leg, cause string) {
	m.cancels.WithLabelValues(leg.String(), cause).Inc()
}

func (m *metrics) turn(what string) { m.turns.WithLabelValues(what).Inc() }

func (m *metrics) coordinates(err error) {
	result := "ok"
	if err != nil {
		result = "failed"
	}
	m.asked.WithLabelValues(result).Inc()
}

func (m *metrics) released(result string) { m.releases.WithLabelValues(result).Inc() }

// inFlight collects gauges at the time of asking.
type inFlight struct{ r *Router }

var (
	turnsDesc   = prometheus.NewDesc("kvferry_router_conversations", "Conversations of which a decode engine keeps a turn, as far as the router remembers.", nil, nil)
	clientsDesc = prometheus.NewDesc("kvferry_router_inflight", "Client requests at this moment.", nil, nil)
	stateDesc   = prometheus.NewDesc("kvferry_router_upstream_state",
		"1: the last leg on the engine did well, or there was none; 0: it failed by the engine's fault.", []string{"leg", "engine"}, nil)
	legsDesc = prometheus.NewDesc("kvferry_router_inflight_legs", "Legs at this moment.", []string{"leg", "engine"}, nil)
)

func (inFlight) Describe(ch chan<- *prometheus.Desc) {
	ch <- clientsDesc
	ch <- turnsDesc
	ch <- legsDesc
	ch <- stateDesc
}

func (c inFlight) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(clientsDesc, prometheus.GaugeValue, float64(c.r.inFlight.Load()))
	ch <- prometheus.MustNewConstMetric(turnsDesc, prometheus.GaugeValue, float64(c.r.turns.len()))
	for _, p := range c.r.pools {
		for _, s := range p.status() {
			ch <- prometheus.MustNewConstMetric(legsDesc, prometheus.GaugeValue, float64(s.InFlight), p.leg.String(), s.Engine)
			state := 1.0
			if s.Failing {
				state = 0
			}
			ch <- prometheus.MustNewConstMetric(stateDesc, prometheus.GaugeValue, state, p.leg.String(), s.Engine)
		}
	}
}
