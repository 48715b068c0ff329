package main

import (
	"context"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

func TestUpAnswersAndStops(t *testing.T) {
	t.Parallel()
	up := serverUp(t, "up", "--listen", "127.0.0.1:0")
	url := up.ready["url"]
	prompt := text(1, 100)
	got, err := complete(context.Background(), url, completionRequest{Model: "kvferry-tiny", Prompt: prompt, MaxTokens: 8, ReturnTokenIDs: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Tokens) != 8 {
		t.Errorf("8 tokens asked for, got %v", got.Tokens)
	}
	line := up.waitLine(func(l string) bool { return strings.HasPrefix(l, "request ") })
	for _, want := range []string{"100 prompt tokens", "7 blocks", "KiB", "over shm (", "1 computed on D", "8 generated"} {
		if !strings.Contains(line, want) {
			t.Errorf("the request line lacks %q: %s", want, line)
		}
	}
	pids := childPIDs(t, up)
	up.signal(syscall.SIGINT)
	if code := up.wait(); code != 0 {
		t.Errorf("exit status %d after Ctrl-C:\n%s", code, up.output())
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
			t.Errorf("process %d is left", pid)
		}
	}
}

// childPIDs reads the three process ids that `up` prints.
func childPIDs(t *testing.T, up *process) []int {
	t.Helper()
	var pids []int
	for _, m := range regexp.MustCompile(`\(pid (\d+)\)`).FindAllStringSubmatch(up.output(), -1) {
		pid, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if len(pids) != 3 {
		t.Fatalf("`up` names %d processes, not 3:\n%s", len(pids), up.output())
	}
	return pids
}

func TestUpReportsADeadChild(t *testing.T) {
	t.Parallel()
	up := serverUp(t, "up", "--listen", "127.0.0.1:0")
	pids := childPIDs(t, up)
	_ = syscall.Kill(pids[0], syscall.SIGKILL)
	if code := up.wait(); code != 1 {
		t.Errorf("exit status %d", code)
	}
	if out := up.output(); !strings.Contains(out, "the prefill engine died: signal: killed") {
		t.Errorf("the output does not say which child died, and why:\n%s", out)
	}
	for _, pid := range pids[1:] {
		if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
			t.Errorf("process %d is left", pid)
		}
	}
}

func TestUpKilledLeavesNoChild(t *testing.T) {
	up := serverUp(t, "up", "--listen", "127.0.0.1:0")
	pids := childPIDs(t, up)
	up.kill()
	eventually(t, "the children die with their parent", func() bool {
		for _, pid := range pids {
			if !gone(pid) {
				return false
			}
		}
		return true
	})
}

// gone is true for a process that does not run: reaped, or a zombie that nobody has reaped yet.
func gone(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(rest, "Z")
}

func TestPortInUseIsOneLine(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	addr := l.Addr().String()
	peers := []string{"engine", "--listen", "127.0.0.1:0", "--cpu-cache", "1MiB", "--tier", "p2p"}
	for _, args := range [][]string{ // the flag in question is the last but one
		{"up", "--listen", addr},
		{"engine", "--listen", addr},
		{"engine", "--listen", "127.0.0.1:0", "--side-channel", addr},
		{"engine", "--listen", "127.0.0.1:0", "--agent-listen", addr},
		slices.Concat(peers, []string{"--p2p-listen", addr}),
		slices.Concat(peers, []string{"--p2p-agent-listen", addr}),
		{"router", "--prefill", "localhost:1", "--decode", "localhost:2", "--listen", addr},
	} {
		p := launch(t, args...)
		if code := p.wait(); code != 1 {
			t.Errorf("%v: exit status %d", args, code)
		}
		says := args[len(args)-2] + " " + addr + " is in use by another program; "
		if out := p.output(); !strings.Contains(out, "kvferry: "+says) || strings.Contains(out, "\n") {
			t.Errorf("%v: the output is not one line with %q:\n%s", args, says, out)
		}
	}
}

// An address that is not this host's is told as such, by its flag; one without a port, as no HOST:PORT.
func TestAddressOfAnotherHost(t *testing.T) {
	t.Parallel()
	const addr = "192.0.2.1:5600"                                                                         // TEST-NET-1
	engine := []string{"engine", "--log-level", "error", "--listen", "127.0.0.1:0", "--transport", "tcp"} // a warning may come before
	peers := slices.Concat(engine, []string{"--cpu-cache", "1MiB", "--tier", "p2p"})
	const foreign = " 192.0.2.1:5600: 192.0.2.1 is none of this host's addresses; "
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"up", "--listen", addr}, "--listen" + foreign},
		{slices.Concat(engine, []string{"--listen", addr}), "--listen" + foreign},
		{slices.Concat(engine, []string{"--side-channel", addr}), "--side-channel" + foreign},
		{slices.Concat(engine, []string{"--agent-listen", addr}), "--agent-listen" + foreign},
		{slices.Concat(peers, []string{"--p2p-listen", addr}), "--p2p-listen" + foreign},
		{slices.Concat(peers, []string{"--p2p-agent-listen", addr}), "--p2p-agent-listen" + foreign},
		{slices.Concat(engine, []string{"--listen", "8001"}), "missing port in address; give HOST:PORT"},
	} {
		p := launch(t, c.args...)
		if code, out := p.wait(), p.output(); code != 2 || !strings.Contains(out, c.says) || strings.Contains(out, "\n") {
			t.Errorf("%v: exit status %d, not one line with %q:\n%s", c.args, code, c.says, out)
		}
	}
}

func TestUsageErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args string
		want []string
	}{
		{"engine --blok-size 16", []string{"unknown flag: --blok-size", "did you mean --block-size?"}},
		{"up --chek", []string{"did you mean --check?"}},
		{"router --prefil x", []string{"did you mean --prefill?"}},
		{"router", []string{"at least one --prefill URL"}},
		{"router --prefill ftp://x --decode localhost:1", []string{"ftp://x", "scheme"}},
		{"engine --role cook", []string{`role "cook"`}},
		{"engine --layout XYZ", []string{"--layout", "XYZ"}},
		{"engine --blocks -3", []string{"number of blocks is -3"}},
		{"engine --block-size 0", []string{"--block-size is 0"}},
		{"engine --vllm 1", []string{"did you mean --vllm-version?"}},
		{"engine --side-channel 0.0.0.0:0", []string{"--side-channel 0.0.0.0:0", "--advertise-host"}},
		{"up --transport pigeon", []string{`"pigeon"`}},
		{"up --lease soon", []string{`"soon"`, "--lease"}},
		{"up --layout XYZ", []string{"--layout", "XYZ"}},
		{"up --listen 8000", []string{"--listen 8000", "HOST:PORT"}},
		{"engine --model /does/not/exist", []string{"/does/not/exist"}},
		{"engine --log-level loud", []string{"loud"}},
		{"engine extra", []string{"takes no arguments"}},
		{"enginee", []string{"unknown command", "did you mean engine?"}},
		{"help bogus", []string{`unknown command "bogus"`, "there are checkpoint, engine, router, store, up"}},
		{"help enginee", []string{"unknown command", "did you mean engine?"}},
		{"help engine x", []string{`unknown command "x"`, "kvferry engine --help"}},
		{"bogus", []string{`unknown command "bogus"`, "there are checkpoint"}},
		{"engine --listen 127.0.0.1:5 --side-channel 127.0.0.1:5", []string{"--side-channel and --listen are both 127.0.0.1:5; give each a port of its own"}},
		{"engine --agent-listen 127.0.0.1:5 --cpu-cache 1MiB --tier p2p --p2p-agent-listen 127.0.0.1:5", []string{"--agent-listen and --p2p-agent-listen are both 127.0.0.1:5;"}},
		{"engine --drain -1s --listen 127.0.0.1:0", []string{"--drain is -1s"}},
		{"engine --fs x", []string{"CPU cache", "--cpu-cache"}},
		{"engine --tier fs --cpu-cache 1MiB", []string{"--fs"}},
		{"router --prefill a:1,tp=x --decode b:1", []string{"tp=x: not a whole number"}},
		{"router --prefill a:1 --decode b:1 --max-body 0", []string{"--max-body is 0"}},
		{"up --seed 7", []string{"--seed needs --check --faults"}},
	} {
		p := launch(t, strings.Fields(tc.args)...)
		if code := p.wait(); code == 0 || code == 1 && (strings.HasPrefix(tc.args, "enginee") || strings.HasPrefix(tc.args, "help")) {
			t.Errorf("%s: exit status %d", tc.args, code)
		}
		for _, want := range tc.want {
			if !strings.Contains(p.output(), want) {
				t.Errorf("%s: output lacks %q:\n%s", tc.args, want, p.output())
			}
		}
	}
}

func TestHelpShowsExamples(t *testing.T) {
	for _, args := range []string{"--help", "help", "help store", "up --help", "engine --help", "router --help", "store --help", "checkpoint --help"} {
		p := launch(t, strings.Fields(args)...)
		if code := p.wait(); code != 0 || !strings.Contains(p.output(), "Examples:") {
			t.Errorf("%s: exit status %d, output:\n%s", args, code, p.output())
		}
	}
}
