package wire

import (
	"math"
	"testing"
)

func TestClockVectors(t *testing.T) {
	for _, v := range codecVectors(t, "codec-valid", "side_channel_clock") {
		want, err := value(t, v.Value).(interface{ Float64() (float64, error) }).Float64()
		if err != nil {
			t.Fatal(err)
		}
		v.expectBytes(t, AppendClock(nil, want))
		if got, err := DecodeClock(*v.Hex); err != nil || got != want {
			t.Errorf("%s: %v, %v", v.Name, got, err)
		}
	}
}

func TestClockRefusals(t *testing.T) {
	for name, b := range map[string][]byte{
		"empty":    nil,
		"cut off":  []byte("\xcb\x40\x5e\xe0"),
		"trailing": append(AppendClock(nil, 1), 0),
		"int":      {5},
		"float32":  []byte("\xca\x40\x00\x00\x00"),
		"bool":     {mTrue},
		"nan":      AppendClock(nil, math.NaN()),
		"infinite": AppendClock(nil, math.Inf(-1)),
	} {
		if v, err := DecodeClock(b); err == nil {
			t.Errorf("%s: %v", name, v)
		}
	}
}

func FuzzDecodeClock(f *testing.F) {
	f.Add(AppendClock(nil, 123.5))
	f.Add([]byte{5})
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := DecodeClock(b)
		if err == nil && string(AppendClock(nil, v)) != string(b) {
			t.Errorf("%x decoded to %v", b, v)
		}
	})
}
