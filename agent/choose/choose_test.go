package choose

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/agent"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNew(t *testing.T) {
	for transport, offers := range map[string]int{"": 2, "auto": 2, "shm": 1, "tcp": 1} {
		a, err := New(Config{Name: agent.Name("a-" + transport), Transport: transport, Listen: "127.0.0.1:0"})
		if err != nil {
			t.Fatalf("%q: %v", transport, err)
		}
		if n := len(a.Offers()); n != offers {
			t.Errorf("%q: %d offers, want %d", transport, n, offers)
		}
		if err := a.Close(); err != nil {
			t.Errorf("%q: %v", transport, err)
		}
	}
	if _, err := New(Config{Name: "x", Transport: "nixl"}); err == nil {
		t.Error("an unknown transport is taken")
	}
	if _, err := New(Config{Name: "x", Transport: "tcp", Listen: "no address"}); err == nil {
		t.Error("an address that is none is taken")
	}
}
