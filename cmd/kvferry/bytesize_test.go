package main

import "testing"

func TestByteSize(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "65536": 65536, "1B": 1, "64KiB": 64 << 10, "256MiB": 256 << 20, "1.5GiB": 3 << 29, "2 TiB": 2 << 40, "3GB": 3e9,
	} {
		var b byteSize
		if err := b.Set(in); err != nil || int64(b) != want {
			t.Errorf("%q: %d, %v, want %d", in, b, err, want)
		}
		var again byteSize
		if err := again.Set(b.String()); err != nil || again != b {
			t.Errorf("%q is said as %q, which is %d, %v", in, b.String(), again, err)
		}
	}
	for _, in := range []string{"", "MiB", "-1", "NaN", "1e30", "1MB2", "256 megs", "Inf"} {
		var b byteSize
		if err := b.Set(in); err == nil {
			t.Errorf("%q is taken for %d", in, b)
		}
	}
}
