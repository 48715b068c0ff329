package wire

import (
	"testing"

	"github.com/kvferry/kvferry/kv"
)

// The vectors of the base-id rule; here because the captured files are.
func TestBaseRequestID(t *testing.T) {
	var f struct {
		Vectors []struct{ ID, Base string } `json:"base_request_id"`
	}
	loadVectors(t, "push-matching", &f)
	for _, v := range f.Vectors {
		if got := kv.RequestID(v.ID).Base(); string(got) != v.Base {
			t.Errorf("%q: base %q, want %q", v.ID, got, v.Base)
		}
	}
	if len(f.Vectors) == 0 {
		t.Fatal("no vectors")
	}
}
