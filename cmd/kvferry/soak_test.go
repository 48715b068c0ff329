//go:build soak

package main

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestSoak runs fault checks, each by another seed, for KVFERRY_SOAK (default two minutes).
// KVFERRY_SOAK_SEED is the first seed; default: the time, so that every soak is another one.
func TestSoak(t *testing.T) {
	long := 2 * time.Minute
	if s := os.Getenv("KVFERRY_SOAK"); s != "" {
		var err error
		if long, err = time.ParseDuration(s); err != nil {
			t.Fatalf("KVFERRY_SOAK: %v", err)
		}
	}
	seed := uint64(time.Now().Unix())
	if s := os.Getenv("KVFERRY_SOAK_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("KVFERRY_SOAK_SEED: %v", err)
		}
	}
	rounds := 0
	for end := time.Now().Add(long); time.Now().Before(end); seed++ {
		p := launch(t, "up", "--check", "--faults", "--seed", strconv.FormatUint(seed, 10))
		code := p.wait()
		lines := strings.Split(strings.TrimSpace(p.output()), "\n")
		t.Log(lines[len(lines)-1])
		if code != 0 {
			t.Errorf("seed %d: exit status %d:\n%s", seed, code, p.output())
		}
		rounds++
	}
	t.Logf("%d rounds", rounds)
}

// TestSoakRequests sends 10,000 requests, or KVFERRY_SOAK_REQUESTS, to engines in this process, half of them in
// each mode, with KVFERRY_SOAK_SEED or 1.
func TestSoakRequests(t *testing.T) {
	requests, seed := 10000, uint64(1)
	if s := os.Getenv("KVFERRY_SOAK_REQUESTS"); s != "" {
		var err error
		if requests, err = strconv.Atoi(s); err != nil || requests < 200 {
			t.Fatalf("KVFERRY_SOAK_REQUESTS is %q, must be a number of at least 200", s)
		}
	}
	if s := os.Getenv("KVFERRY_SOAK_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("KVFERRY_SOAK_SEED: %v", err)
		}
	}
	runEndurance(t, seed, requests/2)
}
