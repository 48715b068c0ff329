package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// fabric is a network in memory: what happens to a dial depends on the address.
type fabric struct {
	mu struct {
		sync.Mutex
		hosts map[string]func(ctx context.Context) (net.Conn, error)
		dials map[string]int
	}
}

func newFabric() *fabric {
	f := &fabric{}
	f.mu.hosts = make(map[string]func(context.Context) (net.Conn, error))
	f.mu.dials = make(map[string]int)
	return f
}

func (f *fabric) set(addr string, host func(context.Context) (net.Conn, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.hosts[addr] = host
}

func (f *fabric) dials(addr string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.dials[addr]
}

func (f *fabric) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	f.mu.Lock()
	host := f.mu.hosts[addr]
	f.mu.dials[addr]++
	f.mu.Unlock()
	if host == nil {
		return nil, errors.New("connection refused")
	}
	return host(ctx)
}

// distant makes dials of a host take a moment: all that is asked for in this one has the same handshake.
func (f *fabric) distant(addr string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	host := f.mu.hosts[addr]
	f.mu.hosts[addr] = func(ctx context.Context) (net.Conn, error) {
		time.Sleep(time.Millisecond)
		return host(ctx)
	}
}

// blackHole never answers a dial.
func blackHole(ctx context.Context) (net.Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// mute accepts and neither reads nor writes; end hangs up.
func mute(end <-chan struct{}) func(context.Context) (net.Conn, error) {
	return func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go func() { <-end; theirs.Close() }()
		return ours, nil
	}
}

// pipeListener is a net.Listener on the fabric.
type pipeListener struct {
	addr  string
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (f *fabric) listen(addr string) *pipeListener {
	l := &pipeListener{addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
	f.set(addr, func(ctx context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		select {
		case l.conns <- theirs:
			return ours, nil
		case <-l.done:
			return nil, errors.New("connection refused")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
	return l
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *pipeListener) Addr() net.Addr { return l }
func (l *pipeListener) Network() string {
	return "pipe"
}
func (l *pipeListener) String() string { return l.addr }

// fakeAgent admits peers whose blob is their name. Everything else of the interface is not there:
// the table must not use it.
type fakeAgent struct {
	agent.Agent
	caps   agent.Capabilities
	offers []agent.Offer
	onAdd  func(ctx context.Context, name agent.Name, id agent.PeerID) error // may be nil; after the peer is in
	mu     struct {
		sync.Mutex
		gen    kv.Generation
		peers  map[agent.Name]agent.PeerID
		adding int
		most   int
		infos  []agent.PeerInfo
	}
}

func newFakeAgent() *fakeAgent {
	a := &fakeAgent{caps: agent.Capabilities{ParallelAdmission: true}, offers: []agent.Offer{{Transport: "tcp"}}}
	a.mu.peers = make(map[agent.Name]agent.PeerID)
	return a
}

func (a *fakeAgent) Capabilities() agent.Capabilities { return a.caps }
func (a *fakeAgent) Offers() []agent.Offer            { return a.offers }

func (a *fakeAgent) AddPeer(ctx context.Context, info agent.PeerInfo) (agent.Peer, error) {
	name := agent.Name(info.Offers[0].Blob)
	a.mu.Lock()
	a.mu.gen++
	id := agent.PeerID{Name: name, Gen: a.mu.gen}
	a.mu.peers[name] = id
	a.mu.adding++
	a.mu.most = max(a.mu.most, a.mu.adding)
	a.mu.infos = append(a.mu.infos, info)
	a.mu.Unlock()
	var err error
	if a.onAdd != nil {
		err = a.onAdd(ctx, name, id)
	}
	a.mu.Lock()
	a.mu.adding--
	a.mu.Unlock()
	if err != nil {
		a.RemovePeer(id)
		return agent.Peer{}, err
	}
	return agent.Peer{ID: id, Transport: info.Offers[0].Transport, Why: "the only one"}, nil
}

func (a *fakeAgent) RemovePeer(id agent.PeerID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.peers[id.Name] == id {
		delete(a.mu.peers, id.Name)
	}
}

func (a *fakeAgent) names() []agent.Name {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []agent.Name
	for n := range a.mu.peers {
		all = append(all, n)
	}
	return all
}

func (a *fakeAgent) most() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.most
}

// recorder keeps events.
type recorder struct {
	mu struct {
		sync.Mutex
		all []event.Event
	}
}

func (r *recorder) Emit(e event.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.all = append(r.mu.all, e)
}

func recorded[E event.Event](r *recorder) []E {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []E
	for _, e := range r.mu.all {
		if x, ok := e.(E); ok {
			out = append(out, x)
		}
	}
	return out
}

const nearHash = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210"

const testHash = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// metadata is a rank of a kvferry engine. Its agent is named after engine, instance and rank.
func metadata(engine kv.EngineID, instance string, r kv.Rank) *wire.AgentMetadata {
	return &wire.AgentMetadata{
		EngineID: engine, AgentMetadata: []byte{}, KVCachesBaseAddr: []uint64{1 << 20}, NumBlocks: 8, BlockLens: []int{64},
		BlockStrides: []int{64}, KVCacheLayout: "LBHNC", BlockSize: 16, AttnBackendName: "CPU_ATTN", PhysicalBlocksPerLogical: 1,
		DCPSize: 1, PCPSize: 1,
		Extension: &wire.Extension{Version: 1, Instance: instance, HostID: "host", Capabilities: []string{"push_fail"},
			Agents: []wire.AgentOffer{{Transport: "tcp", Blob: []byte(agentName(engine, instance, r))}}},
	}
}

func agentName(engine kv.EngineID, instance string, r kv.Rank) agent.Name {
	return agent.Name(fmt.Sprintf("%s/%s/%d.%d", engine, instance, r.PP, r.TP))
}

func payloadOf(hash string, inner []byte) []byte {
	return wire.AppendHandshakePayload(nil, wire.HandshakePayload{CompatibilityHash: hash, AgentMetadata: inner})
}

func payload(t testing.TB, m *wire.AgentMetadata, hash string) []byte {
	t.Helper()
	inner, err := wire.AppendAgentMetadata(nil, m, wire.ConnectorVersion)
	if err != nil {
		t.Fatal(err)
	}
	return payloadOf(hash, inner)
}

// serve starts an engine's side channel on the fabric with TP ranks 0…tp-1.
func (f *fabric) serve(t testing.TB, addr string, engine kv.EngineID, instance string, tp int) *Listener {
	t.Helper()
	l, err := NewListener(f.listen(addr), ListenerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for r := range tp {
		rank := kv.Rank{TP: r}
		if err := l.Set(rank, 1, payload(t, metadata(engine, instance, rank), testHash)); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// bed is a table on a fabric.
type bed struct {
	*fabric
	table  *Table
	agent  *fakeAgent
	events *recorder
}

func newBed(t testing.TB, change func(*Config, *fakeAgent)) *bed {
	t.Helper()
	b := &bed{fabric: newFabric(), agent: newFakeAgent(), events: &recorder{}}
	cfg := Config{Agent: b.agent, Self: "self", Hash: testHash, EnforceHash: true, LocalFactors: "model=m",
		NearHashes: map[string]string{nearHash: "its mode is pull, ours is push"}, Dial: b.dial, Events: b.events}
	if change != nil {
		change(&cfg, b.agent)
	}
	table, err := NewTable(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.table = table
	return b
}

func target(engine kv.EngineID, addr string, tps ...int) Target {
	host, _, _ := net.SplitHostPort(addr)
	t := Target{Engine: engine, Host: host, Port: 5600, TP: 64, PP: 1}
	if len(tps) == 0 {
		tps = []int{0}
	}
	for _, r := range tps {
		t.Ranks = append(t.Ranks, kv.Rank{TP: r})
	}
	return t
}

type result struct {
	c   *Connected
	err error
}

// ask is Ensure with a channel: at once when connected.
func (b *bed) ask(tg Target) <-chan result {
	out := make(chan result, 2) // a second one would be a fault that tests look for
	if c := b.table.Ensure(tg, func(c *Connected, err error) { out <- result{c, err} }); c != nil {
		out <- result{c, nil}
	}
	return out
}

func (b *bed) connect(t testing.TB, tg Target) *Connected {
	t.Helper()
	r := <-b.ask(tg)
	if r.err != nil {
		t.Fatal(r.err)
	}
	return r.c
}

func (b *bed) refused(t testing.TB, tg Target, phase Phase) *HandshakeError {
	t.Helper()
	r := <-b.ask(tg)
	var e *HandshakeError
	if !errors.As(r.err, &e) || e.Phase != phase {
		t.Fatalf("got %v, %v; want a failure in phase %q", r.c, r.err, phase)
	}
	return e
}

// sizes are those of everything in the table that could grow.
func (t *Table) sizes() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprintf("engines %d owners %d idle %d flights %d admitting %d slots %d",
		len(t.mu.engines), len(t.mu.owners), t.mu.idle.Len(), len(t.mu.flights), len(t.mu.admitting), t.mu.slots.total)
}

func (b *bed) wantSizes(t testing.TB, engines, agents int) {
	t.Helper()
	want := fmt.Sprintf("engines %d owners %d idle %d flights 0 admitting 0 slots 0", engines, agents, engines)
	if got := b.table.sizes(); got != want {
		t.Errorf("table has %s; want %s", got, want)
	}
	if got := b.agent.names(); len(got) != agents {
		t.Errorf("the agent has %d peers, want %d: %v", len(got), agents, got)
	}
}
