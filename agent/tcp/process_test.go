package tcp

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
)

// childEnv names the peer that a child process grants all of its memory to.
const childEnv = "KVFERRY_TCP_TEST_CHILD"

const childBytes = 64 << 20

// child is an agent in a process of its own. It prints its offer, its memory's address and a grant,
// and lives until its standard input ends.
func child() {
	a, err := New(Config{})
	if err != nil {
		panic(err)
	}
	m, err := a.Alloc(childBytes)
	if err != nil {
		panic(err)
	}
	g, err := a.Grant(agent.GrantSpec{
		Peer: agent.Name(os.Getenv(childEnv)), Ranges: []kv.Descriptor{{Addr: m.Addr(), Length: childBytes}},
	})
	if err != nil {
		panic(err)
	}
	fmt.Printf("%x %d %x\n", a.Offers()[0].Blob, m.Addr(), g[:])
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// process is a running child, added as a peer of p, and a transfer that fills its memory.
type process struct {
	cmd      *exec.Cmd
	peer     agent.PeerID
	transfer agent.Transfer
}

func startChild(t *testing.T, p *Agent, m agent.Memory) *process {
	t.Helper()
	c := &process{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), childEnv+"="+string(p.Name()))
	in, err := c.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var blobHex, grantHex string
	var addr uint64
	if _, err := fmt.Sscan(strings.TrimSpace(line), &blobHex, &addr, &grantHex); err != nil {
		t.Fatal(err)
	}
	blob, _ := hex.DecodeString(blobHex)
	peer, err := p.AddPeer(t.Context(), agent.PeerInfo{Offers: []agent.Offer{{Transport: Transport, Blob: blob}}})
	if err != nil {
		t.Fatal(err)
	}
	c.peer = peer.ID
	c.transfer = agent.Transfer{LocalIdx: []uint32{0}, RemoteIdx: []uint32{0}, Silence: 10 * time.Second}
	grant, _ := hex.DecodeString(grantHex)
	copy(c.transfer.Grant[:], grant)
	if c.transfer.Local, err = p.Prepare(agent.Local, []kv.Descriptor{{Addr: m.Addr(), Length: childBytes}}); err != nil {
		t.Fatal(err)
	}
	if c.transfer.Remote, err = p.Prepare(peer.ID, []kv.Descriptor{{Addr: addr, Length: childBytes}}); err != nil {
		t.Fatal(err)
	}
	return c
}

// told is what an agent has told so far.
type told struct {
	t      *testing.T
	a      *Agent
	events []agent.Event
}

// until is the first event that fits, now or later.
func until[E agent.Event](x *told, fits func(E) bool) E {
	x.t.Helper()
	for i := 0; ; i++ {
		for i >= len(x.events) {
			select {
			case ev := <-x.a.Events():
				x.events = append(x.events, ev)
			case <-time.After(20 * time.Second):
				x.t.Fatal("the event does not come")
			}
		}
		if e, ok := x.events[i].(E); ok && fits(e) {
			return e
		}
	}
}

// A process that is killed in the middle of transfers is noticed at once; one that is stopped runs
// its transfers into their bound of silence and is lost when it does not answer their end. Neither
// costs a third process anything.
func TestProcesses(t *testing.T) {
	p, err := New(Config{AbortTimeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	m, err := p.Alloc(childBytes)
	if err != nil {
		t.Fatal(err)
	}
	x := &told{t: t, a: p}
	good, killed, stopped := startChild(t, p, m), startChild(t, p, m), startChild(t, p, m)
	serve := func() {
		t.Helper()
		id, err := p.Post(good.transfer)
		if err != nil {
			t.Fatal(err)
		}
		if r := until(x, func(r agent.Result) bool { return r.Transfer == id }); r.Outcome != agent.OutcomeDone {
			t.Fatalf("the third process is not served: %v", r.Err)
		}
	}
	serve()

	var ids []agent.TransferID
	for range 20 {
		id, err := p.Post(killed.transfer)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	if err := killed.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if r := until(x, func(r agent.Result) bool { return r.Transfer == ids[19] }); r.Outcome != agent.OutcomePeerLost || r.Took > 5*time.Second {
		t.Errorf("transfer to a killed process: %v after %v (%v)", r.Outcome, r.Took, r.Err)
	}
	until(x, func(l agent.PeerLost) bool { return l.Peer == killed.peer })

	if err := stopped.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped.transfer.Silence = 300 * time.Millisecond
	id, err := p.Post(stopped.transfer)
	if err != nil {
		t.Fatal(err)
	}
	serve()
	until(x, func(r agent.Result) bool { return r.Transfer == id && r.Outcome != agent.OutcomeDone })
	until(x, func(s agent.Stopped) bool { return s.Transfer == id })
	until(x, func(l agent.PeerLost) bool { return l.Peer == stopped.peer })
	serve()
}
