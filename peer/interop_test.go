package peer

import (
	"bytes"
	"context"
	"encoding/hex"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/kv"
)

// Listener and Table over TCP with the defaults.
func TestOverTCP(t *testing.T) {
	ln, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := NewListener(ln, ListenerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.Set(kv.Rank{}, 1, payload(t, metadata("P", "i", kv.Rank{}), testHash)); err != nil {
		t.Fatal(err)
	}
	b := newBed(t, func(c *Config, _ *fakeAgent) { c.Dial, c.Events = nil, nil })
	defer b.table.Close()
	tg := Target{Engine: "P", Host: "127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port, Ranks: []kv.Rank{{}}}
	c := b.connect(t, tg)
	if off := c.Clock.Offset; off < -1 || off > 1 {
		t.Errorf("two readings of one clock differ by %v s", off)
	}
	b.table.Drop("P", c.Gen, "test")
	tg.Ranks = append(tg.Ranks, kv.Rank{TP: 1})
	tg.TP = 2
	if e := b.refused(t, tg, PhaseQuery); e.Rank.TP != 1 || !strings.Contains(e.Error(), "rank that it does not have") {
		t.Error(e)
	}
	l.Close()
	b.refused(t, tg, PhaseDial)
}

const pythonClient = `
import sys, zmq
ctx = zmq.Context()
def ask(data, timeout):
    s = ctx.socket(zmq.REQ)
    s.setsockopt(zmq.LINGER, 0)
    s.setsockopt(zmq.RCVTIMEO, timeout)
    s.connect(sys.argv[1])
    s.send(data)
    try:
        return " ".join(p.hex() for p in s.recv_multipart())
    except zmq.Again:
        return "nothing"
    finally:
        s.close()
good = bytes.fromhex("93c40c6765745f6d6574615f6d73670001")
print(ask(good, 5000))
print(ask(good[:-1] + bytes([9]), 300))
print(ask(b"hello", 300))
print(ask(good, 5000))
ctx.destroy(linger=0)
`

// A stock client's socket (libzmq REQ) is served, and its bad requests cost others nothing.
func TestPythonClient(t *testing.T) {
	python := os.Getenv("KVFERRY_PYTHON")
	if python == "" {
		python = "python3"
	}
	if exec.Command(python, "-c", "import zmq").Run() != nil {
		t.Skipf("%s has no zmq (set KVFERRY_PYTHON)", python)
	}
	ln, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := NewListener(ln, ListenerConfig{Clock: func() float64 { return 123.5 }})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	rank := kv.Rank{TP: 1}
	served := payload(t, metadata("P", "i", rank), testHash)
	if err := l.Set(rank, 1, served); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, "-c", pythonClient, "tcp://"+l.Addr().String())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.Bytes())
	}
	good := hex.EncodeToString(served) + " cb405ee00000000000"
	want := []string{good, "nothing", "nothing", good}
	if got := strings.Split(strings.TrimSpace(string(out)), "\n"); strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
