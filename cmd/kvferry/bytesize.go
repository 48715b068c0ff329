package main

import (
	"fmt"
	"strconv"
	"strings"
)

// byteSize is a flag of a number of bytes: 65536, 64KiB, 256MiB, 2GiB, 1TiB, or decimal with KB, MB, GB, TB.
type byteSize int64

var byteUnits = []struct {
	name  string
	bytes int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1}, {"", 1},
}

// maxBytes is more than any machine has, and far from an overflow.
const maxBytes = 1 << 50

// Set parses a size.
func (b *byteSize) Set(s string) error {
	for _, u := range byteUnits {
		number, ok := strings.CutSuffix(s, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if err != nil || !(n >= 0) || n*float64(u.bytes) > maxBytes {
			break
		}
		*b = byteSize(n * float64(u.bytes))
		return nil
	}
	return fmt.Errorf("%q is not a size like 256MiB, 2GiB or 65536", s)
}

// String is the shortest exact form.
func (b *byteSize) String() string {
	n := int64(*b)
	for i := 3; i >= 0; i-- {
		if u := byteUnits[i]; n != 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

// Type names the flag's argument.
func (b *byteSize) Type() string { return "size" }
