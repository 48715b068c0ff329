package p2p

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// stock plays a recorded peer: it sends bytes and keeps what it gets.
type stock struct {
	t      *testing.T
	name   string
	router *zmtp.Router
	dealer *zmtp.Dealer
	got    chan []byte
	done   chan struct{}
}

func newStock(t *testing.T, n *node) *stock {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &stock{t: t, name: ln.Addr().String(), got: make(chan []byte, 4096), done: make(chan struct{})}
	if s.router, err = zmtp.Listen(t.Context(), ln, zmtp.Options{}); err != nil {
		t.Fatal(err)
	}
	if s.dealer, err = zmtp.DialDealer(t.Context(), nil, n.name, zmtp.Options{Identity: s.name}); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(s.done)
		for {
			m, err := s.router.Recv(context.Background())
			if err != nil {
				return
			}
			s.got <- m.Frames[0]
		}
	}()
	t.Cleanup(s.close)
	return s
}

func (s *stock) close() {
	_ = s.dealer.Close()
	_ = s.router.Close()
	<-s.done
}

func (s *stock) send(frames ...[]byte) {
	s.t.Helper()
	if err := s.dealer.Send(s.t.Context(), frames...); err != nil {
		s.t.Fatalf("send %x: %v", frames, err)
	}
}

func (s *stock) next() []byte {
	s.t.Helper()
	select {
	case b := <-s.got:
		return b
	case <-time.After(patience):
		s.t.Fatal("nothing comes")
		return nil
	}
}

// expect compares the next message with a recorded one.
func (s *stock) expect(want []byte) {
	s.t.Helper()
	if got := s.next(); !bytes.Equal(got, want) {
		s.t.Fatalf("got\n%x\nwant\n%x", got, want)
	}
}

// expectType checks no more than what it is: connects differ in every run.
func (s *stock) expectType(want string) {
	s.t.Helper()
	b := s.next()
	m, err := wire.DecodeP2P(b)
	if err != nil || m.Type() != want {
		s.t.Fatalf("got %x (%v), want a %s", b, err, want)
	}
}

// connect is a stock peer's, as recorded: 16 blocks of 4096 bytes.
func (s *stock) connect() []byte {
	return wire.AppendP2P(nil, &wire.P2PConnect{
		PeerID: s.name, AgentMetadata: []byte("nixl"), BaseAddr: 140154990174208, NumBlocks: 16, BlockLen: testBlockLen,
		Fingerprint: "2dbaaeb8de80efbe", HashSeed: StockHashSeed,
	})
}

// meet shakes hands, the stock peer first.
func (s *stock) meet() {
	s.t.Helper()
	s.send(s.connect())
	s.expectType("connect")
	s.expectType("connect_ack")
	s.send(wire.AppendP2P(nil, wire.P2PConnectAck{PeerID: s.name}))
}

// likeNixl is an agent that admits anybody, cannot revoke, and whose transfers end when told to. Its
// memory is another's.
type likeNixl struct {
	agent.Agent
	events chan agent.Event
	mu     struct {
		sync.Mutex
		last   uint64
		posted chan agent.TransferID
	}
}

func newLikeNixl(t *testing.T, name string) *likeNixl {
	t.Helper()
	inner, err := local.New(local.Config{}).Agent(agent.Name(name))
	if err != nil {
		t.Fatal(err)
	}
	a := &likeNixl{Agent: inner, events: make(chan agent.Event, 1024)}
	a.mu.posted = make(chan agent.TransferID, 1024)
	return a
}

func (a *likeNixl) Capabilities() agent.Capabilities { return agent.Capabilities{CheapAdmission: true} }
func (a *likeNixl) Offers() []agent.Offer {
	return []agent.Offer{{Transport: "nixl", Blob: []byte("ours")}}
}
func (a *likeNixl) Events() <-chan agent.Event { return a.events }

func (a *likeNixl) next() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.last++
	return a.mu.last
}

func (a *likeNixl) AddPeer(_ context.Context, info agent.PeerInfo) (agent.Peer, error) {
	if len(info.Offers) != 1 || string(info.Offers[0].Blob) != "nixl" {
		return agent.Peer{}, errors.New("metadata that cannot be loaded")
	}
	n := a.next()
	return agent.Peer{ID: agent.PeerID{Name: agent.Name(info.Offers[0].Blob), Gen: kv.Generation(n)}}, nil
}

func (a *likeNixl) RemovePeer(agent.PeerID) {}

func (a *likeNixl) Prepare(owner agent.PeerID, d []kv.Descriptor) (agent.ListID, error) {
	if owner == agent.Local {
		return a.Agent.Prepare(owner, d)
	}
	return agent.ListID(1<<40 + a.next()), nil
}

func (a *likeNixl) Post(agent.Transfer) (agent.TransferID, error) {
	id := agent.TransferID(a.next())
	a.mu.posted <- id
	return id, nil
}

func (a *likeNixl) Cancel(id agent.TransferID) { a.end(id, agent.OutcomeCancelled) }

func (a *likeNixl) end(id agent.TransferID, o agent.Outcome) {
	a.events <- agent.Result{Transfer: id, Outcome: o}
	a.events <- agent.Stopped{Transfer: id}
}

// finish ends the next transfer well.
func (a *likeNixl) finish(t *testing.T) {
	t.Helper()
	select {
	case id := <-a.mu.posted:
		a.end(id, agent.OutcomeDone)
	case <-time.After(patience):
		t.Fatal("nothing is written")
	}
}

func stockNode(t *testing.T) (*node, *likeNixl) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := newLikeNixl(t, ln.Addr().String())
	return nodeOn(t, ln, a, func(c *Config) { c.Fingerprint = "2dbaaeb8de80efbe" }), a
}

type hexBytes []byte

func (h *hexBytes) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	v, err := hex.DecodeString(s)
	*h = v
	return err
}

func load(t *testing.T, name string, into any) {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}
