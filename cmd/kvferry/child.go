package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// startTimeout bounds how long a child may take to print its ready line: loading a large
	// checkpoint from a cold disk is the slowest honest case.
	startTimeout = 2 * time.Minute
	// stopTimeout is how long a child may drain after SIGTERM before it is killed.
	stopTimeout = 15 * time.Second
	// tailLines of a child's log are kept to say why it died.
	tailLines = 12
	// maxLogLine is the longest log line of a child that is read whole.
	maxLogLine = 1 << 20
)

// child is one server process that this one started. Its log lines go to onLog, one call at a time.
type child struct {
	name  string
	cmd   *exec.Cmd
	ready readyLine     // valid once start has returned nil
	done  chan struct{} // closed when the process and its pipes have ended
	err   error         // why it ended; valid after done

	mu struct {
		sync.Mutex
		tail      []string
		lastWords string // what the program said with a failing exit status
		stopping  bool   // we asked it to end
	}
}

// readyLine is what a server prints when requests can be sent: `ready NAME key=value …`.
type readyLine map[string]string

func parseReady(line string) (readyLine, bool) {
	fields := strings.Fields(line)
	if len(fields) < 2 || fields[0] != "ready" {
		return nil, false
	}
	r := readyLine{"": fields[1]}
	for _, f := range fields[2:] {
		if k, v, ok := strings.Cut(f, "="); ok {
			r[k] = v
		}
	}
	return r, true
}

// startChild starts this program again with args and returns once the child is ready. The child
// is killed when this process dies. onLog may be nil.
func startChild(ctx context.Context, name string, onLog func(line string), args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("cannot find this program to start %s: %w", name, err)
	}
	c := &child{name: name, cmd: exec.Command(self, args...), done: make(chan struct{})}
	c.cmd.Env = childEnviron(allSettings(newRoot()))
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	stderr, err := c.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	// A process group of its own: Ctrl-C reaches only this process, which then stops its children
	// in order.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	ready := make(chan readyLine, 1)
	started := make(chan error, 1)
	go c.run(stdout, stderr, ready, started, onLog)
	if err := <-started; err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	select {
	case c.ready = <-ready:
		return c, nil
	case <-c.done:
		return nil, c.err
	case <-ctx.Done():
		c.stop()
		return nil, fmt.Errorf("%s was not ready: %w", name, context.Cause(ctx))
	}
}

// run starts the process, reads its pipes and waits for it, all on one OS thread: the kernel sends
// Pdeathsig when the thread that started the child ends, so that thread must live as long.
func (c *child) run(stdout, stderr io.Reader, ready chan<- readyLine, started chan<- error, onLog func(string)) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(c.done)
	err := c.cmd.Start()
	started <- err
	if err != nil {
		c.err = err
		return
	}
	var pipes sync.WaitGroup
	pipes.Go(func() {
		eachLine(stdout, func(line string) {
			if r, ok := parseReady(line); ok {
				select {
				case ready <- r:
				default:
				}
			}
		})
	})
	pipes.Go(func() {
		eachLine(stderr, func(line string) {
			if c.remember(line) && onLog != nil {
				onLog(line)
			}
		})
	})
	pipes.Wait()
	c.err = c.explain(c.cmd.Wait())
}

func eachLine(r io.Reader, f func(string)) {
	br := bufio.NewReader(r)
	for {
		line, err := readLine(br)
		if line != "" {
			f(line)
		}
		if err != nil {
			return
		}
	}
}

// readLine reads one line and drops what is beyond maxLogLine.
func readLine(br *bufio.Reader) (string, error) {
	var sb strings.Builder
	for {
		part, err := br.ReadSlice('\n')
		if sb.Len() < maxLogLine {
			sb.Write(part)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		return strings.TrimRight(sb.String(), "\r\n"), err
	}
}

// remember keeps a line for explain. It reports false for the program's last words, which are told with
// its end and need no line of their own.
func (c *child) remember(line string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if words, ok := strings.CutPrefix(line, "kvferry: "); ok {
		c.mu.lastWords = words
		return false
	}
	c.mu.tail = append(c.mu.tail, line)
	if n := len(c.mu.tail); n > tailLines {
		c.mu.tail = c.mu.tail[n-tailLines:]
	}
	return true
}

// explain turns the process's end into an error that says what its log said last.
func (c *child) explain(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.stopping && err == nil {
		return nil
	}
	if c.mu.lastWords != "" {
		return fmt.Errorf("%s ended: %s", c.name, c.mu.lastWords)
	}
	how := "ended by itself"
	if err != nil {
		how = "died: " + err.Error()
	}
	if len(c.mu.tail) == 0 {
		return fmt.Errorf("%s %s", c.name, how)
	}
	return fmt.Errorf("%s %s; its last log lines:\n    %s", c.name, how, strings.Join(c.mu.tail, "\n    "))
}

// kill ends the child with SIGKILL, which is no fault of the child's. It returns once it is gone.
func (c *child) kill() {
	c.mu.Lock()
	c.mu.stopping = true
	c.mu.Unlock()
	_ = c.cmd.Process.Kill()
	<-c.done
}

// stop ends the child: SIGTERM, then SIGKILL after stopTimeout. It returns once the child is gone.
func (c *child) stop() {
	c.mu.Lock()
	c.mu.stopping = true
	c.mu.Unlock()
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	select {
	case <-c.done:
	case <-timer.C:
		_ = c.cmd.Process.Kill()
		<-c.done
	}
}
