package p2p

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/p2p/session"
)

// stockPython names an interpreter with vLLM; test/interop/p2p-control.sh says what it needs.
const stockPython = "KVFERRY_STOCK_PYTHON"

// TestStockTierLive speaks with a released tier: the whole control plane, each role in turn. The bytes do not
// come here: this node says that its agent is a NIXL agent of the other process, which has real metadata.
func TestStockTierLive(t *testing.T) {
	if os.Getenv(stockPython) == "" {
		t.Skip(stockPython + " is not set: see test/interop/p2p-control.sh")
	}
	s := startStock(t, StockHashSeed)
	var meta struct {
		Metadata, Fingerprint string
		Base                  uint64
		Blocks                int
		BlockLen              int `json:"block_len"`
	}
	s.call(t, &meta, "meta")
	s.call(t, nil, "put", "w", map[string]int{liveKey(1): 11, liveKey(2): 22})
	n, ag := lentNode(t, meta.Metadata, meta.Base, meta.Blocks, StockHashSeed)

	// As the consumer: connect, ack, lookup, fetch, and the bytes in the memory that was lent.
	n.begin(tier.Request{ID: "r", Source: s.source("live-1")})
	ks := liveKeys(1, 2, 9)
	n.startLoad("r", ks)
	if got := n.lookup("r", ks); !slices.Equal(got, []core.Verdict{core.Hit, core.Hit, core.Miss}) {
		t.Errorf("lookup: %v", got)
	}
	lease, slots, _ := n.m.Use(ks[:2])
	for i, slot := range slots {
		var landed int
		if s.call(t, &landed, "landed", int(slot)); landed != 11*(i+1) {
			t.Errorf("slot %d: %d", slot, landed)
		}
	}
	n.m.EndUse(lease)
	n.m.Finish("r")
	if got := s.sessions(t); !slices.Equal(got[n.name], []bool{true, true}) {
		t.Errorf("sessions there: %v", got)
	}
	st := n.tier.Stats().Peers[session.PeerID(s.name)]
	if st.FetchesDone != 1 || st.BlocksIn != 2 || st.BlocksUnchecked != 2 || st.SessionsOpened != 1 {
		t.Errorf("%+v", st)
	}

	// As the source: its lookup is answered; its fetch is refused, as nothing can be written from here.
	n.have(liveKeys(5))
	host, port, _ := net.SplitHostPort(n.name)
	number, _ := strconv.Atoi(port)
	s.call(t, nil, "new", "q", map[string]any{"remote_kv_source": map[string]any{"kv_request_id": "live-2", "remote_host": host, "remote_port": number}})
	s.until(t, "q", liveKey(6), "MISS")
	s.until(t, "q", liveKey(5), "HIT_PENDING")
	select {
	case id := <-ag.mu.posted:
		ag.end(id, agent.OutcomeFailed)
	case <-time.After(patience):
		t.Fatal("it does not fetch what it has found")
	}
	s.until(t, "q", liveKey(5), "MISS")
	s.call(t, nil, "finish", "q")

	// Disconnect, ours and theirs.
	n.close()
	s.untilGone(t, n.name)
	again, _ := lentNode(t, meta.Metadata, meta.Base, meta.Blocks, StockHashSeed)
	again.begin(tier.Request{ID: "r", Source: s.source("live-3")})
	if got := again.lookup("r", liveKeys(9)); got[0] != core.Miss {
		t.Error(got)
	}
	again.m.Finish("r")
	s.call(t, nil, "shutdown")
	again.gone(s.name)
	if st := again.tier.Stats(); st.Ended[session.Goodbye]+st.Ended[session.Lost] != 1 {
		t.Errorf("%+v", st)
	}
}

// Other hashes: both sides refuse, and the request misses at once.
func TestStockTierLiveRejects(t *testing.T) {
	if os.Getenv(stockPython) == "" {
		t.Skip(stockPython + " is not set: see test/interop/p2p-control.sh")
	}
	s := startStock(t, "another-seed")
	var meta struct {
		Metadata string
		Base     uint64
		Blocks   int
	}
	s.call(t, &meta, "meta")
	n, _ := lentNode(t, meta.Metadata, meta.Base, meta.Blocks, StockHashSeed)
	n.begin(tier.Request{ID: "r", Source: s.source("live-1")})
	begun := time.Now()
	if got := n.lookup("r", liveKeys(1)); got[0] != core.Miss {
		t.Error(got)
	}
	t.Logf("a miss after %v", time.Since(begun))
	n.noted("peer_refused", "its hash seed is another")
	s.untilGone(t, n.name)
}

func liveKey(i byte) string { return hex.EncodeToString([]byte(stockKey(i))) }

func liveKeys(is ...byte) []core.Key { return stockKeys(is...) }

// lentAgent offers the metadata of another process's NIXL agent, and admits anybody.
type lentAgent struct {
	*likeNixl
	metadata []byte
}

func (a *lentAgent) Offers() []agent.Offer {
	return []agent.Offer{{Transport: stockTransport, Blob: a.metadata}}
}

func (a *lentAgent) AddPeer(_ context.Context, _ agent.PeerInfo) (agent.Peer, error) {
	return agent.Peer{ID: agent.PeerID{Name: "stock", Gen: kv.Generation(a.next())}}, nil
}

// lentNode is a node that tells the peer of memory of another process.
func lentNode(t *testing.T, metadata string, base uint64, blocks int, seed string) (*node, *lentAgent) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	blob, err := hex.DecodeString(metadata)
	if err != nil {
		t.Fatal(err)
	}
	a := &lentAgent{newLikeNixl(t, ln.Addr().String()), blob}
	return nodeOn(t, ln, &rebased{lentAgent: a, base: base}, func(c *Config) {
		c.Fingerprint, c.HashSeed = "", seed
		c.Base, c.Blocks = base, blocks
	}), a
}

// rebased takes descriptors of the memory that was lent.
type rebased struct {
	*lentAgent
	base uint64
}

func (a *rebased) Prepare(agent.PeerID, []kv.Descriptor) (agent.ListID, error) {
	return agent.ListID(1<<40 + a.next()), nil
}

func (a *rebased) Release(agent.ListID) {}

// stockTier is the other process.
type stockTier struct {
	name string
	in   io.Writer
	out  *bufio.Reader
}

func startStock(t *testing.T, seed string) *stockTier {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	name := ln.Addr().String()
	_, port, _ := net.SplitHostPort(name)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Getenv(stockPython), "../../test/interop/p2p_stock_node.py", port, seed)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
	s := &stockTier{name: name, in: in, out: bufio.NewReader(out)}
	if line, err := s.out.ReadString('\n'); err != nil || line != "\"up\"\n" {
		t.Fatalf("the stock tier does not start: %q, %v", line, err)
	}
	return s
}

func (s *stockTier) source(id string) *tier.Source { return (&node{name: s.name}).source(id) }

func (s *stockTier) call(t *testing.T, into any, command ...any) {
	t.Helper()
	line, err := json.Marshal(command)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(s.in, "%s\n", line); err != nil {
		t.Fatal(err)
	}
	got, err := s.out.ReadBytes('\n')
	if err != nil {
		t.Fatalf("%v: %v", command, err)
	}
	var answer struct {
		OK    json.RawMessage
		Error string
	}
	if err := json.Unmarshal(got, &answer); err != nil || answer.Error != "" {
		t.Fatalf("%v: %s (%v)", command, got, err)
	}
	if into != nil {
		if err := json.Unmarshal(answer.OK, into); err != nil {
			t.Fatalf("%v: %s: %v", command, got, err)
		}
	}
}

func (s *stockTier) sessions(t *testing.T) (all map[string][]bool) {
	t.Helper()
	s.call(t, &all, "sessions")
	return all
}

const stockPatience = time.Minute

// until asks for a key until its verdict is as wanted.
func (s *stockTier) until(t *testing.T, req, key, want string) {
	t.Helper()
	var got []string
	for end := time.Now().Add(stockPatience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if s.call(t, &got, "lookup", req, []string{key}); got[0] == want {
			return
		}
	}
	t.Fatalf("%s is %v, not %s", key, got, want)
}

func (s *stockTier) untilGone(t *testing.T, peer string) {
	t.Helper()
	for end := time.Now().Add(stockPatience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if _, there := s.sessions(t)[peer]; !there {
			return
		}
	}
	t.Fatalf("the session there does not end: %v", s.sessions(t))
}
