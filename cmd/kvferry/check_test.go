package main

import (
	"strings"
	"syscall"
	"testing"
)

func TestCheckAgrees(t *testing.T) {
	for _, tc := range []struct {
		mode, transport, want string
		more                  []string
	}{
		{"push", "auto", "push over shm,", nil}, {"push", "tcp", "push over tcp,", nil},
		{"pull", "tcp", "pull over tcp,", nil},
		{"pull", "shm", "pull over shm, at most 1 prompt token computed on D, 3 turns read back from D,", []string{"--bidirectional-kv-xfer"}},
	} {
		t.Run(strings.Join(append([]string{tc.mode, tc.transport}, tc.more...), " "), func(t *testing.T) {
			t.Parallel()
			p := launch(t, append([]string{"up", "--check", "--mode", tc.mode, "--transport", tc.transport}, tc.more...)...)
			code := p.wait()
			lines := strings.Split(strings.TrimSpace(p.output()), "\n")
			last := lines[len(lines)-1]
			if code != 0 || !strings.HasPrefix(last, "check passed: ") || !strings.Contains(last, " "+tc.want) {
				t.Fatalf("exit status %d:\n%s", code, p.output())
			}
			if len(lines) != 1 {
				t.Errorf("the output of a check that passes is not one line:\n%s", p.output())
			}
		})
	}
}

// A decode engine that damages what it receives must fail the check.
func TestCheckSeesDamage(t *testing.T) {
	t.Parallel()
	p := launch(t, "up", "--check", "--inject-kv-fault", "zero-head")
	code := p.wait()
	if code != 1 || !strings.Contains(p.output(), "check FAILED: ") || !strings.Contains(p.output(), "the pair gives") {
		t.Fatalf("exit status %d:\n%s", code, p.output())
	}
}

func TestCheckCasesCoverTheEdges(t *testing.T) {
	const bs, context = 16, 2048
	lengths := map[int]bool{}
	for _, c := range checkCases(bs, context) {
		for _, p := range c.prompts {
			lengths[len(p)] = true
			if len(p) >= context {
				t.Errorf("%s: a prompt of %d tokens does not fit", c.name, len(p))
			}
		}
	}
	for _, n := range []int{1, bs - 1, bs, bs + 1, context - 1} {
		if !lengths[n] {
			t.Errorf("no prompt of %d tokens", n)
		}
	}
}

func TestPromptsDiffer(t *testing.T) {
	seen := map[string]int{}
	for seed := range 100 {
		p := text(seed, 40)
		if len(p) != 40 {
			t.Fatalf("text(%d, 40) has %d characters", seed, len(p))
		}
		if other, dup := seen[p]; dup {
			t.Errorf("seeds %d and %d give the same prompt", other, seed)
		}
		seen[p] = seed
	}
}

// A check that a signal ends has found nothing, and does not say that it has.
func TestInterruptedCheckIsNoVerdict(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{}, {"--faults"}, {"--topology", "p2p"}} {
		p := launch(t, append([]string{"up", "--check", "-v"}, args...)...)
		p.waitLine(func(l string) bool { return strings.Contains(l, "request finished") })
		p.signal(syscall.SIGINT)
		if code := p.wait(); code != 1 {
			t.Errorf("%v: exit status %d", args, code)
		}
		out := p.output()
		for _, lie := range []string{"FAULT", "FAILED", "passed", "do not agree", "WRONG"} {
			if strings.Contains(out, lie) {
				t.Errorf("%v: the output has %q:\n%s", args, lie, out)
			}
		}
		if !strings.HasSuffix(out, "kvferry: interrupted before the check could tell") {
			t.Errorf("%v: the last line is not of the interruption:\n%s", args, out)
		}
	}
}
