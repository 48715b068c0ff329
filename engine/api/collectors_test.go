package api

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestCollectors are shown at /metrics; one that clashes is refused.
func TestCollectors(t *testing.T) {
	extra := func(name string) Config {
		return Config{Collectors: []prometheus.Collector{prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: "x"})}}
	}
	s, err := newServer(extra("x_total"), newFake(nil))
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if !strings.Contains(w.Body.String(), "x_total 0\n") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if _, err := newServer(extra(prefix+"steps_total"), newFake(nil)); err == nil {
		t.Error("a name that the engine has itself was accepted")
	}
}
