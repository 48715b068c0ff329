package wire

import (
	"strings"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

// The lease's generation travels from P's answer through the router to D, and is absent where there
// is none.
func TestLeaseInParams(t *testing.T) {
	for _, lease := range []kv.Generation{1, 1790000000000000, maxLease} {
		p := kv.TransferParams{DoRemotePrefill: true, Mode: kv.Push, DCPSize: 1, PPSize: 1, Lease: lease}
		got, err := ParseTransferParams(AppendTransferParams(nil, &p))
		if err != nil || got.Lease != lease {
			t.Errorf("%d: %d, %v", lease, got.Lease, err)
		}
	}
	if b := AppendTransferParams(nil, &kv.TransferParams{}); strings.Contains(string(b), "kvferry") {
		t.Errorf("%s", b)
	}
	for _, token := range []string{"x", strings.Repeat("f", MaxReleaseToken)} {
		p := kv.TransferParams{DoRemotePrefill: true, Mode: kv.Push, DCPSize: 1, PPSize: 1, Lease: 1, Release: token}
		got, err := ParseTransferParams(AppendTransferParams(nil, &p))
		if err != nil || got.Release != token {
			t.Errorf("%s: %+v, %v", token, got, err)
		}
	}
	for _, bad := range []string{`1`, `["x"]`, `"` + strings.Repeat("f", MaxReleaseToken+1) + `"`} {
		if p, err := ParseTransferParams([]byte(`{"kvferry_release":` + bad + `}`)); err == nil {
			t.Errorf("%s: %+v", bad, p)
		}
	}
	for _, bad := range []string{`-1`, `1.5`, `"1"`, `9007199254740992`, `[]`} {
		if p, err := ParseTransferParams([]byte(`{"kvferry_lease":` + bad + `}`)); err == nil {
			t.Errorf("%s: %+v", bad, p)
		}
	}
}
