package wire

import (
	"net/http"
	"strings"
	"testing"
)

func TestIsReleaseKey(t *testing.T) {
	good := strings.Repeat("09af", ReleaseKeyLen/4)
	for s, want := range map[string]bool{
		good: true, "": false, good[1:]: false, good + "0": false, strings.ToUpper(good): false, good[1:] + "g": false, good[1:] + "/": false,
	} {
		if IsReleaseKey(s) != want {
			t.Errorf("%q is a key: %v", s, !want)
		}
	}
	if http.CanonicalHeaderKey(ReleaseKeyHeader) != ReleaseKeyHeader {
		t.Error("the header is not in its canonical form")
	}
}
