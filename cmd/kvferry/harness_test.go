package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds every wait of these tests. It is no measurement: a machine under load may need it.
const patience = 60 * time.Second

var binary string // the program under test, built once

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "kvferry")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(dir, "kvferry")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
		os.Exit(1)
	}
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue { // tests wait for processes more than they compute
		_ = flag.Set("test.parallel", "6")
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// process is a running kvferry command.
type process struct {
	t     *testing.T
	name  string
	cmd   *exec.Cmd
	ready readyLine
	done  chan struct{}

	mu struct {
		sync.Mutex
		out     []string // stdout and stderr, line by line
		changed chan struct{}
	}
}

// launch starts a command and kills it at the end of the test.
func launch(t *testing.T, args ...string) *process {
	t.Helper()
	p := &process{t: t, name: strings.Join(args[:min(3, len(args))], " "), cmd: exec.Command(binary, args...), done: make(chan struct{})}
	p.mu.changed = make(chan struct{})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout, p.cmd.Stderr = w, w
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	read := make(chan struct{})
	go func() {
		defer close(read)
		eachLine(r, p.add)
	}()
	go func() {
		_ = p.cmd.Wait()
		<-read
		_ = r.Close()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.signal(syscall.SIGCONT)
		p.signal(syscall.SIGKILL)
		<-p.done
		if t.Failed() {
			t.Logf("---- output of %s\n%s", p.name, p.output())
		}
	})
	return p
}

// serverUp starts a server command and waits for its ready line.
func serverUp(t *testing.T, args ...string) *process {
	t.Helper()
	p := launch(t, args...)
	line := p.waitLine(func(l string) bool { return strings.HasPrefix(l, "ready ") })
	p.ready, _ = parseReady(line)
	return p
}

func (p *process) add(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.out = append(p.mu.out, line)
	close(p.mu.changed)
	p.mu.changed = make(chan struct{})
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.mu.out, "\n")
}

// waitLine returns the first line of output that ok accepts.
func (p *process) waitLine(ok func(string) bool) string {
	p.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for seen := 0; ; {
		p.mu.Lock()
		lines, changed := p.mu.out[seen:], p.mu.changed
		for _, l := range lines {
			if ok(l) {
				p.mu.Unlock()
				return l
			}
		}
		seen += len(lines)
		p.mu.Unlock()
		select {
		case <-changed:
		case <-p.done:
			p.t.Fatalf("%s ended before the line came:\n%s", p.name, p.output())
		case <-timer.C:
			p.t.Fatalf("%s: the line did not come within %v:\n%s", p.name, patience, p.output())
		}
	}
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// kill is SIGKILL; it returns when the process is gone.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// wait returns the exit status.
func (p *process) wait() int {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		p.t.Fatalf("%s did not end within %v:\n%s", p.name, patience, p.output())
	}
	return p.cmd.ProcessState.ExitCode()
}

func (p *process) free() float64 {
	p.t.Helper()
	v, err := gauge(context.Background(), p.ready["url"], freeBlocks)
	if err != nil {
		p.t.Fatal(err)
	}
	return v
}

// eventually waits until ok holds. What it waits for has no event that this process could see.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// answer is an HTTP answer, or why there is none.
type answer struct {
	status int
	body   string
	err    error
}

// message is the error message of an OpenAI error body.
func (a answer) message() string {
	var b struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal([]byte(a.body), &b) != nil {
		return ""
	}
	return b.Error.Message
}

func post(ctx context.Context, url, body string, header ...string) answer {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, body: string(bytes.TrimSpace(b)), err: err}
}

// testRelay is a relay that lives as long as the test.
func testRelay(t *testing.T) *relay {
	t.Helper()
	r, err := newRelay()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

func waitHeld(t *testing.T, r *relay) {
	t.Helper()
	select {
	case <-r.held:
	case <-time.After(patience):
		t.Fatal("the relay never held bytes back")
	}
}
