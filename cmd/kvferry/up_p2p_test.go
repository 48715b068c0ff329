package main

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
)

func TestRackCheckAgrees(t *testing.T) {
	for _, tc := range []struct{ topology, transport, want string }{
		{"p2p", "auto", "tokens from the other engine's CPU cache over shm"},
		{"p2p", "tcp", "tokens from the other engine's CPU cache over tcp"},
		{"store", "auto", "tokens from the store over shm"},
	} {
		t.Run(tc.topology+" "+tc.transport, func(t *testing.T) {
			t.Parallel()
			p := launch(t, "up", "--topology", tc.topology, "--check", "--transport", tc.transport)
			code := p.wait()
			lines := strings.Split(strings.TrimSpace(p.output()), "\n")
			last := lines[len(lines)-1]
			if code != 0 || !strings.HasPrefix(last, "check passed: ") || !strings.Contains(last, tc.want) || !strings.Contains(last, "3 mutants caught") {
				t.Fatalf("exit status %d:\n%s", code, p.output())
			}
			if len(lines) != 1 {
				t.Errorf("the output of a check that passes is not one line:\n%s", p.output())
			}
		})
	}
}

// Damage that no checksum sees must fail the check by its tokens; damage that one sees must fail it
// because the second engine computes then.
func TestRackCheckSeesDamage(t *testing.T) {
	for fault, want := range map[string]string{
		"unseen":   "engine 2 gives",
		"flip-bit": "at most a block of 16 is allowed",
	} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			p := launch(t, "up", "--topology", "p2p", "--check", "--inject-tier-fault", fault)
			code := p.wait()
			if code != 1 || !strings.Contains(p.output(), "check FAILED: ") || !strings.Contains(p.output(), want) {
				t.Fatalf("exit status %d:\n%s", code, p.output())
			}
			if fault != "unseen" && strings.Contains(p.output(), "engine 2 gives") {
				t.Errorf("a damaged block was used:\n%s", p.output())
			}
		})
	}
}

var tryLine = regexp.MustCompile(`^(try|then): +curl -s (\S+)/v1/completions -d '(.*)'$`)

// What `up` says to try does what it says: the second engine computes the tail only.
func TestUpRack(t *testing.T) {
	for _, topology := range []string{"p2p", "store"} {
		t.Run(topology, func(t *testing.T) {
			t.Parallel()
			up := serverUp(t, "up", "--topology", topology, "--listen", "127.0.0.1:0")
			var texts []string
			for _, which := range []string{"try", "then"} {
				try := tryLine.FindStringSubmatch(up.waitLine(func(l string) bool { return strings.HasPrefix(l, which) }))
				if try == nil {
					t.Fatalf("no command to try:\n%s", up.output())
				}
				if which == "then" && topology == "store" { // nobody waits for a store, so we do
					eventually(t, "the store has the blocks", func() bool { return storeBlocksOf(t, up) >= 6 })
				}
				a := post(context.Background(), try[2]+"/v1/completions", try[3])
				if a.status != 200 {
					t.Fatalf("%d %s %v", a.status, a.body, a.err)
				}
				var body struct{ Choices []struct{ Text string } }
				if err := json.Unmarshal([]byte(a.body), &body); err != nil {
					t.Fatal(err)
				}
				texts = append(texts, body.Choices[0].Text)
			}
			if texts[0] != texts[1] || texts[0] == "" {
				t.Errorf("the engines answer %q", texts)
			}
			line := up.waitLine(func(l string) bool { return strings.HasPrefix(l, "engine 2: request ") })
			if !strings.Contains(line, "100 prompt tokens, 0 cached, 96 loaded (p2p=96), 4 computed") {
				t.Errorf("engine 2 says %s", line)
			}
			pids := regexp.MustCompile(`\(pid (\d+)\)`).FindAllStringSubmatch(up.output(), -1)
			up.signal(syscall.SIGINT)
			if code := up.wait(); code != 0 {
				t.Errorf("exit status %d after Ctrl-C:\n%s", code, up.output())
			}
			if want := map[string]int{"p2p": 2, "store": 3}[topology]; len(pids) != want {
				t.Errorf("%d processes are named, not %d", len(pids), want)
			}
			for _, m := range pids {
				var pid int
				_, _ = fmt.Sscan(m[1], &pid) // it is a number
				if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
					t.Errorf("process %d is left", pid)
				}
			}
		})
	}
}

// storeBlocksOf is how many blocks the store of an `up` has.
func storeBlocksOf(t *testing.T, up *process) float64 {
	t.Helper()
	m := regexp.MustCompile(`(?m)^store +(\S+)`).FindStringSubmatch(up.output())
	if m == nil {
		t.Fatalf("no store:\n%s", up.output())
	}
	n, err := gaugeSum(context.Background(), m[1], "kvferry_store_blocks")
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Flags of another topology are refused before anything starts.
func TestUpTopologyUsage(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"--topology ring":                              "use pd, p2p, store",
		"--topology p2p --mode pull":                   "--mode is for --topology pd, not p2p",
		"--topology store --check --faults":            "--faults is for --topology pd",
		"--cpu-cache 1GiB":                             "--cpu-cache is for --topology p2p or store, not pd",
		"--topology p2p --listen 127.0.0.1:65535":      "the second engine has the one after it",
		"--topology p2p --listen here":                 "HOST:PORT",
		"--topology p2p --cpu-cache 1":                 "CPU cache of 1 bytes",
		"--topology p2p --inject-tier-fault lightning": "lightning",
	} {
		p := launch(t, append([]string{"up"}, strings.Fields(args)...)...)
		if code := p.wait(); code != 2 || !strings.Contains(p.output(), want) || strings.Count(p.output(), "\n") > 1 {
			t.Errorf("%s: exit status %d, %q", args, code, p.output())
		}
	}
}

func TestTierTokens(t *testing.T) {
	r := requestLine{TierFrom: "cpu=32,p2p=64"}
	var got []int
	for _, tier := range []string{"cpu", "p2p", "fs", ""} {
		got = append(got, r.tierTokens(tier))
	}
	if !slices.Equal(got, []int{32, 64, 0, 0}) {
		t.Error(got)
	}
}
