package shm

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp"
	"github.com/kvferry/kvferry/kv"
)

const (
	benchBlocks = 1024
	benchBlock  = 64 << 10
)

// scene is a poster and an owner of memory in one process, and a permutation of the blocks.
type scene struct {
	p, d     agent.Agent
	transfer agent.Transfer
}

func newScene(b *testing.B, p, d agent.Agent, perm []int, op agent.Op) *scene {
	b.Cleanup(func() { p.Close(); d.Close() })
	s := &scene{p: p, d: d, transfer: agent.Transfer{Op: op, Silence: time.Minute}}
	pm, err := p.Alloc(benchBlocks * benchBlock)
	must(b, err)
	dm, err := d.Alloc(benchBlocks * benchBlock)
	must(b, err)
	peer, err := p.AddPeer(b.Context(), agent.PeerInfo{Offers: d.Offers()})
	must(b, err)
	for i := range pm.Bytes() {
		pm.Bytes()[i], dm.Bytes()[i] = byte(i), byte(i+1)
	}
	descs := func(m agent.Memory) []kv.Descriptor {
		out := make([]kv.Descriptor, benchBlocks)
		for i := range out {
			out[i] = kv.Descriptor{Addr: m.Addr() + uint64(i*benchBlock), Length: benchBlock}
		}
		return out
	}
	s.transfer.Local, err = p.Prepare(agent.Local, descs(pm))
	must(b, err)
	s.transfer.Remote, err = p.Prepare(peer.ID, descs(dm))
	must(b, err)
	for i, k := range perm {
		s.transfer.LocalIdx = append(s.transfer.LocalIdx, uint32(i))
		s.transfer.RemoteIdx = append(s.transfer.RemoteIdx, uint32(k))
	}
	s.transfer.Grant, err = d.Grant(agent.GrantSpec{Peer: p.Name(), Access: agent.Access(op), Ranges: descs(dm)})
	must(b, err)
	return s
}

// round is one transfer, from Post to its Result.
func (s *scene) round(b *testing.B) time.Duration {
	begin := time.Now()
	_, err := s.p.Post(s.transfer)
	must(b, err)
	r := (<-s.p.Events()).(agent.Result)
	took := time.Since(begin)
	<-s.p.Events()
	if r.Outcome != agent.OutcomeDone {
		b.Fatal(r.Err)
	}
	return took
}

func must(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// yardstick is the C program.
type yardstick struct {
	in  io.WriteCloser
	out *bufio.Reader
}

func newYardstick(b *testing.B, perm []int) *yardstick {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		b.Skip("no gcc for the yardstick")
	}
	bin := filepath.Join(b.TempDir(), "permute")
	if out, err := exec.Command(gcc, "-O2", "-o", bin, "testdata/permute.c").CombinedOutput(); err != nil {
		b.Fatalf("gcc: %v\n%s", err, out)
	}
	cmd := exec.Command(bin, strconv.Itoa(benchBlocks), strconv.Itoa(benchBlock))
	in, err := cmd.StdinPipe()
	must(b, err)
	out, err := cmd.StdoutPipe()
	must(b, err)
	must(b, cmd.Start())
	b.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	for _, k := range perm {
		fmt.Fprintln(in, k)
	}
	return &yardstick{in: in, out: bufio.NewReader(out)}
}

func (y *yardstick) round(b *testing.B) time.Duration {
	fmt.Fprintln(y.in, "g")
	line, err := y.out.ReadString('\n')
	must(b, err)
	ns, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	must(b, err)
	return time.Duration(ns)
}

// BenchmarkAgainstC moves 1,024 scattered blocks of 64 KiB by every transport and by a plain C
// program, in alternating rounds, and reports the medians of the ratios C to transport: 1.0 is as
// fast as the C program.
func BenchmarkAgainstC(b *testing.B) {
	perm := rand.New(rand.NewPCG(1, 1)).Perm(benchBlocks)
	c := newYardstick(b, perm)
	tp, err := tcp.New(tcp.Config{})
	must(b, err)
	td, err := tcp.New(tcp.Config{})
	must(b, err)
	names := []string{"shm-write", "shm-read", "tcp-write"}
	scenes := []*scene{
		newScene(b, newAgent(b, Config{}), newAgent(b, Config{}), perm, agent.Write),
		newScene(b, newAgent(b, Config{}), newAgent(b, Config{}), perm, agent.Read),
		newScene(b, tp, td, perm, agent.Write),
	}
	for range 2 { // first touches, in every place
		c.round(b)
		for _, s := range scenes {
			s.round(b)
		}
	}
	ratios := make([][]float64, len(scenes))
	var base []float64
	b.SetBytes(benchBlocks * benchBlock)
	for b.Loop() {
		for i, s := range scenes {
			yard := c.round(b)
			ratios[i] = append(ratios[i], float64(yard)/float64(s.round(b)))
			base = append(base, float64(yard)/1e6)
		}
	}
	for i, name := range names {
		b.ReportMetric(median(ratios[i]), name+"/C")
	}
	b.ReportMetric(median(base), "C-ms")
}

func median(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}
