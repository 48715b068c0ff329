package shm

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// A child is an agent in a process of its own, driven by JSON lines: one request in, one answer
// out. Events that a test waits for are requests too.

type request struct {
	Do     string
	Offers []agent.Offer
	Peer   agent.Name
	Access agent.Access
	Ranges []kv.Descriptor
	Op     agent.Op
	Grant  agent.GrantID
	Notif  []byte
	Fill   byte
	Times  int
}

type answer struct {
	Err    string
	Name   agent.Name
	Offers []agent.Offer
	Addr   uint64
	Grant  agent.GrantID
	// Of "events": what came, in order. Of a notification the checksum of the child's memory when
	// it was read.
	Events []seen
}

type seen struct {
	Kind    string // result, stopped, notification, lost
	Outcome agent.Outcome
	Msg     []byte
	Sum     uint32
	Err     string
}

const childBytes = 8 << 20

// child is the main function of the process.
func child(string) int {
	a, err := New(Config{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	m, err := a.Alloc(childBytes)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	c := &childState{a: a, m: m}
	go c.watch()
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var r request
		if in.Decode(&r) != nil {
			return 0 // the test has ended
		}
		var ans answer
		if err := c.do(r, &ans); err != nil {
			ans.Err = err.Error()
		}
		if out.Encode(ans) != nil {
			return 0
		}
	}
}

type childState struct {
	a    *Agent
	m    agent.Memory
	peer agent.PeerID
	mu   struct {
		sync.Mutex
		seen []seen
	}
}

func (c *childState) watch() {
	for ev := range c.a.Events() {
		var s seen
		switch ev := ev.(type) {
		case agent.Result:
			s = seen{Kind: "result", Outcome: ev.Outcome}
			if ev.Err != nil {
				s.Err = ev.Err.Error()
			}
		case agent.Stopped:
			s = seen{Kind: "stopped"}
		case agent.Notification:
			s = seen{Kind: "notification", Msg: ev.Msg, Sum: crc32.ChecksumIEEE(c.m.Bytes())}
		case agent.PeerLost:
			s = seen{Kind: "lost"}
		}
		c.mu.Lock()
		c.mu.seen = append(c.mu.seen, s)
		c.mu.Unlock()
	}
}

func (c *childState) do(r request, ans *answer) error {
	var err error
	switch r.Do {
	case "hello":
		ans.Name, ans.Offers, ans.Addr = c.a.Name(), c.a.Offers(), c.m.Addr()
	case "add":
		var p agent.Peer
		p, err = c.a.AddPeer(context.Background(), agent.PeerInfo{Offers: r.Offers})
		c.peer = p.ID
	case "fill":
		fillBytes(c.m.Bytes(), r.Fill)
	case "grant":
		ans.Grant, err = c.a.Grant(agent.GrantSpec{Peer: r.Peer, Access: r.Access, Ranges: []kv.Descriptor{{Addr: c.m.Addr(), Length: childBytes}}})
	case "post":
		err = c.post(r)
	case "events":
		c.mu.Lock()
		defer c.mu.Unlock()
		ans.Events = c.mu.seen
	}
	return err
}

func (c *childState) post(r request) error {
	local, err := c.a.Prepare(agent.Local, []kv.Descriptor{{Addr: c.m.Addr(), Length: childBytes}})
	if err != nil {
		return err
	}
	remote, err := c.a.Prepare(c.peer, r.Ranges)
	if err != nil {
		return err
	}
	for range max(r.Times, 1) {
		if _, err := c.a.Post(agent.Transfer{
			Op: r.Op, Local: local, LocalIdx: []uint32{0}, Remote: remote, RemoteIdx: []uint32{0},
			Grant: r.Grant, Notif: r.Notif, Silence: time.Minute,
		}); err != nil {
			return err
		}
	}
	return nil
}

// process is a child seen from its parent.
type process struct {
	t    testing.TB
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	name agent.Name
	info agent.PeerInfo
	addr uint64
}

func startChild(t testing.TB) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "KVFERRY_SHM_CHILD=agent")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	p := &process{t: t, cmd: cmd, in: in, out: bufio.NewReader(out)}
	t.Cleanup(p.kill)
	a := p.do(request{Do: "hello"})
	p.name, p.info, p.addr = a.Name, agent.PeerInfo{Offers: a.Offers}, a.Addr
	return p
}

func (p *process) do(r request) answer {
	p.t.Helper()
	b, err := json.Marshal(r)
	must(p.t, err)
	_, err = p.in.Write(append(b, '\n'))
	must(p.t, err)
	line, err := p.out.ReadBytes('\n')
	must(p.t, err)
	var a answer
	must(p.t, json.Unmarshal(line, &a))
	if a.Err != "" {
		p.t.Fatalf("child: %s: %s", r.Do, a.Err)
	}
	return a
}

// until asks for the child's events until enough satisfies.
func (p *process) until(what string, enough func([]seen) bool) []seen {
	p.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if ev := p.do(request{Do: "events"}).Events; enough(ev) {
			return ev
		}
	}
	p.t.Fatalf("child: no %s", what)
	return nil
}

func count(evs []seen, kind string) int {
	n := 0
	for _, e := range evs {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

// kill ends the process as nothing else does.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// fillBytes writes a pattern that differs for every seed, block and place.
func fillBytes(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8) ^ byte(i>>16) ^ seed*37
	}
}
