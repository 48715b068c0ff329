package p2p

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/mux"
	"github.com/kvferry/kvferry/agent/shm"
	"github.com/kvferry/kvferry/agent/tcp"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
)

// childEnv makes the test binary a node of its own: "-" for a source, else the name of one to fetch from.
const childEnv = "KVFERRY_P2P_TEST_CHILD"

// childNode is a node with real agents, until its standard input ends. It says its name, and, when it
// has fetched, "fetched".
func childNode(source string) {
	if err := runChild(source); err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func runChild(source string) error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	name := ln.Addr().String()
	s, err := shm.New(shm.Config{Name: agent.Name(name)})
	if err != nil {
		return err
	}
	c, err := tcp.New(tcp.Config{Name: agent.Name(name), Listen: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	ag, err := mux.New(mux.Config{Backends: []mux.Backend{{Agent: s}, {Agent: c}}})
	if err != nil {
		return err
	}
	mem, err := ag.Alloc(testSlots * testBlockLen)
	if err != nil {
		return err
	}
	t, err := New(Config{Listener: ln, Name: name, Agent: ag, Base: mem.Addr(), Blocks: testSlots, BlockLen: testBlockLen, HashSeed: StockHashSeed, Instance: name})
	if err != nil {
		return err
	}
	changed := make(chan struct{}, 1)
	m, err := tier.New(tier.Config{Memory: mem.Bytes(), BlockLen: testBlockLen, Secondaries: []tier.Secondary{t}, OnChange: func() { notify(changed) }})
	if err != nil {
		return err
	}
	if err := m.Begin(tier.Request{ID: "have"}); err != nil {
		return err
	}
	if source == "-" {
		res, _ := m.Reserve("have", keys(0, 8))
		for i, s := range res.Slots {
			copy(m.Block(s), content(key(res.Index[i])))
		}
		m.Commit(res.ID, true)
	}
	fmt.Println(name)
	if source != "-" {
		if err := m.Begin(tier.Request{ID: "r", Source: (&node{name: source}).source("q")}); err != nil {
			return err
		}
		for pending := true; pending; {
			pending = false
			for _, v := range m.Lookup("r", keys(0, 8)) {
				if v == core.Miss {
					return errors.New("a miss")
				}
				pending = pending || v == core.Pending
			}
			if pending {
				<-changed
			}
		}
		m.Finish("r")
		fmt.Println("fetched")
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, m.Close(), ag.Close())
}

// child is such a process.
type child struct {
	*exec.Cmd
	name string
	out  *bufio.Reader
	end  io.Closer
}

func startChild(t *testing.T, source string) *child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &child{Cmd: exec.Command(exe, "-test.run=^$")}
	c.Env = append(os.Environ(), childEnv+"="+source)
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	c.end, c.out = in, bufio.NewReader(out)
	t.Cleanup(func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()
	})
	c.name = c.line(t)
	if source != "-" {
		if got := c.line(t); got != "fetched" {
			t.Fatal(got)
		}
	}
	return c
}

func (c *child) line(t *testing.T) string {
	t.Helper()
	s, err := c.out.ReadString('\n')
	if err != nil {
		t.Fatal("the child ends: ", err)
	}
	if strings.HasPrefix(s, "failed") {
		t.Fatal(s)
	}
	return strings.TrimSpace(s)
}
