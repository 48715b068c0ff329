package worker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/local"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/scheduler"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
	"github.com/kvferry/kvferry/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Shape of every test engine's memory.
const (
	testBlockSize = 4 // tokens
	testBlocks    = 16
	testLayers    = 2
	testBlockLen  = 64 // bytes per block and layer
)

// cluster is engines on one fabric and one network in memory. Everything runs in a synctest bubble.
type cluster struct {
	t       *testing.T
	fabric  *local.Fabric
	net     *pipeNet
	engines []*engine
}

func newCluster(t *testing.T, cfg local.Config) *cluster {
	return &cluster{t: t, fabric: local.New(cfg), net: newPipeNet()}
}

// outsider is an agent of no engine, which has p's for a peer and hears nothing. It is closed by end.
func (c *cluster) outsider(name agent.Name, p *engine) (x agent.Agent, to agent.PeerID, end func()) {
	c.t.Helper()
	x, err := c.fabric.Agent(name)
	if err != nil {
		c.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		for range x.Events() {
		}
		close(done)
	}()
	peer, err := x.AddPeer(c.t.Context(), agent.PeerInfo{Offers: p.ranks[0].agent.Offers()})
	if err != nil {
		c.t.Fatal(err)
	}
	return x, peer.ID, func() {
		c.t.Helper()
		if err := x.Close(); err != nil {
			c.t.Fatal(err)
		}
		<-done
	}
}

func (c *cluster) close() {
	for _, e := range c.engines {
		e.close()
	}
}

// engine is the parts of an engine that a hand-off touches: ledger, loop, and a worker per rank.
type engine struct {
	c        *cluster
	id       kv.EngineID
	host     string
	tp       int
	ranks    []*rank
	listener *peer.Listener
	half     *scheduler.Half
	trace    *recorder

	calls chan func()
	stop  chan struct{}
	ended chan struct{}

	mu struct {
		sync.Mutex
		outcomes map[kv.RequestID][]connector.Outcome
		changed  chan struct{}
	}
}

type rank struct {
	agent  agent.Agent
	name   agent.Name
	mem    []byte
	addr   uint64
	table  *peer.Table
	worker *Worker
}

type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// options of an engine; the zero value is a TP 1 engine of both roles with default times.
type options struct {
	tp      int
	role    connector.Role
	lease   time.Duration
	timeout time.Duration
	silence time.Duration
	wrap    func(rank int, a agent.Agent) agent.Agent
	agents  string                   // prefix of the agents' names; default the engine's id
	host    string                   // default the same
	dial    func(dial dialer) dialer // of the side channels of others
	old     bool                     // announces PUSH_FAIL only
	mode    kv.TransferMode
	both    bool                      // bidirectional
	ttl     time.Duration             // how long D keeps blocks for a next turn
	shape   func(*wire.AgentMetadata) // what the engine says of its memory to others
}

func (c *cluster) engine(id string, o options) *engine {
	c.t.Helper()
	if o.tp == 0 {
		o.tp = 1
	}
	if o.role == "" {
		o.role = connector.Both
	}
	if o.agents == "" {
		o.agents = id
	}
	if o.host == "" {
		o.host = o.agents
	}
	e := &engine{c: c, id: kv.EngineID(id), host: o.host, tp: o.tp, trace: &recorder{},
		calls: make(chan func()), stop: make(chan struct{}), ended: make(chan struct{})}
	e.mu.outcomes = make(map[kv.RequestID][]connector.Outcome)
	e.mu.changed = make(chan struct{})
	must := func(err error) {
		if err != nil {
			c.t.Fatal(err)
		}
	}
	var err error
	e.listener, err = peer.NewListener(c.net.listen(net.JoinHostPort(e.host, "5600")), peer.ListenerConfig{Asked: func() {
		for _, r := range e.ranks {
			r.worker.Asked()
		}
	}})
	must(err)
	e.half, err = scheduler.New(scheduler.Config{Engine: e.id, Host: e.host, Port: 5600, TP: o.tp, Role: o.role, Mode: o.mode,
		BlockSize: testBlockSize, Lease: o.lease, RegistrationTimeout: o.timeout, Bidirectional: o.both, DecoderBlocksTTL: o.ttl,
		Clock: peer.At, Events: e.trace})
	must(err)
	for i := range o.tp {
		r := &rank{name: agent.Name(fmt.Sprintf("%s.%d", o.agents, i))}
		a, err := c.fabric.Agent(r.name)
		must(err)
		r.agent = a
		if o.wrap != nil {
			r.agent = o.wrap(i, a)
		}
		mem, err := r.agent.Alloc(testLayers * testBlocks * testBlockLen)
		must(err)
		r.mem, r.addr = mem.Bytes(), mem.Addr()
		meta := e.metadata(r, o)
		layout, err := geometry.FromMetadata(meta, o.tp, 1)
		must(err)
		if o.shape != nil {
			o.shape(meta)
		}
		blob, err := wire.AppendAgentMetadata(nil, meta, wire.ConnectorVersion)
		must(err)
		payload := wire.AppendHandshakePayload(nil, wire.HandshakePayload{CompatibilityHash: testHash, AgentMetadata: blob})
		must(e.listener.Set(kv.Rank{TP: i}, 1, payload))
		dial := dialer(c.net.dial)
		if o.dial != nil {
			dial = o.dial(dial)
		}
		r.table, err = peer.NewTable(peer.Config{Agent: r.agent, Self: e.id, Hash: testHash, EnforceHash: true, Dial: dial, Events: e.trace})
		must(err)
		r.worker, err = New(Config{Engine: e.id, Host: e.host, Port: 5600, Rank: kv.Rank{TP: i}, TP: o.tp, Mode: o.mode, Agent: r.agent,
			Peers: r.table, Layout: layout, Lease: o.lease, RegistrationTimeout: o.timeout, TransferSilence: o.silence, Events: e.trace})
		must(err)
		e.ranks = append(e.ranks, r)
	}
	go e.loop()
	c.engines = append(c.engines, e)
	return e
}

var testHash = strings.Repeat("ab", 32)

func (e *engine) metadata(r *rank, o options) *wire.AgentMetadata {
	m := &wire.AgentMetadata{EngineID: e.id, AgentMetadata: []byte{}, NumBlocks: testBlocks, BlockSize: testBlockSize,
		KVCacheLayout: "LBHNC", AttnBackendName: "TEST", PhysicalBlocksPerLogical: 1, DCPSize: 1, PCPSize: 1}
	for l := range testLayers {
		m.KVCachesBaseAddr = append(m.KVCachesBaseAddr, r.addr+uint64(l*testBlocks*testBlockLen))
		m.BlockLens = append(m.BlockLens, testBlockLen)
		m.BlockStrides = append(m.BlockStrides, testBlockLen)
	}
	m.Extension = &wire.Extension{Version: wire.ExtensionVersion, Instance: o.agents, Capabilities: Capabilities(),
		Agents: []wire.AgentOffer{{Transport: local.Transport, Blob: []byte(r.name)}}}
	if o.old {
		m.Extension.Capabilities = []string{PushFailCapability}
	}
	return m
}

// loop is the engine's loop: the owner of the ledger.
func (e *engine) loop() {
	defer close(e.ended)
	outputs := make(chan connector.WorkerOutput)
	var readers sync.WaitGroup
	for _, r := range e.ranks {
		readers.Go(func() {
			for o := range r.worker.Outputs() {
				select {
				case outputs <- overTheBoundary(e.c.t, o, connector.AppendWorkerOutput, connector.DecodeWorkerOutput):
				case <-e.stop:
				}
			}
		})
	}
	defer readers.Wait()
	for {
		var due <-chan time.Time
		if at, ok := e.half.Deadline(); ok {
			due = time.After(time.Until(at))
		}
		select {
		case f := <-e.calls:
			f()
		case o := <-outputs:
			e.record(e.half.Update(time.Now(), o))
		case <-due:
			e.record(e.half.Expire(time.Now()))
		case <-e.stop:
			return
		}
		if meta, ok := e.half.Metadata(time.Now()); ok {
			for _, r := range e.ranks {
				r.worker.Submit(overTheBoundary(e.c.t, meta, connector.AppendStepMeta, connector.DecodeStepMeta))
			}
		}
	}
}

// overTheBoundary carries a value as between two processes, so that no test relies on shared memory.
func overTheBoundary[T any](t *testing.T, v T, encode func([]byte, *T) ([]byte, error), decode func([]byte) (T, error)) T {
	b, err := encode(nil, &v)
	if err == nil {
		v, err = decode(b)
	}
	if err != nil {
		t.Errorf("%T does not survive msgpack: %v", v, err)
	}
	return v
}

func (e *engine) record(out []connector.Outcome) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, o := range out {
		e.mu.outcomes[o.ID] = append(e.mu.outcomes[o.ID], o)
	}
	close(e.mu.changed)
	e.mu.changed = make(chan struct{})
}

// do runs f in the loop.
func (e *engine) do(f func(h *scheduler.Half)) {
	done := make(chan struct{})
	e.calls <- func() { f(e.half); close(done) }
	<-done
}

// outcome waits for the request's n-th outcome, at most d.
func (e *engine) outcome(id kv.RequestID, d time.Duration) connector.Outcome {
	e.c.t.Helper()
	end := time.After(d)
	for {
		e.mu.Lock()
		got, changed := e.mu.outcomes[id], e.mu.changed
		e.mu.Unlock()
		if len(got) > 0 {
			return got[0]
		}
		select {
		case <-changed:
		case <-end:
			e.c.t.Fatalf("%s: request %s has no outcome after %v\n%s", e.id, id, d, e.trace)
		}
	}
}

func (e *engine) outcomes(id kv.RequestID) []connector.Outcome {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mu.outcomes[id]
}

func (e *engine) close() {
	for _, r := range e.ranks {
		if err := r.worker.Close(); err != nil {
			e.c.t.Errorf("%s: closing: %v", e.id, err)
		}
	}
	close(e.stop)
	<-e.ended
	if err := e.listener.Close(); err != nil {
		e.c.t.Errorf("%s: closing the listener: %v", e.id, err)
	}
}

// leg is what a router sends to one side.
type leg struct {
	id       kv.RequestID
	transfer kv.TransferID
	tokens   int
	digest   connector.Digest
	blocks   []kv.BlockID
}

// prefillLeg runs P's side up to its end.
func (e *engine) prefillLeg(l leg, reason connector.FinishReason) (hold bool) {
	e.c.t.Helper()
	e.do(func(h *scheduler.Half) {
		err := h.Arrived(time.Now(), connector.Request{ID: l.id, PromptTokens: l.tokens, Digest: l.digest,
			Params: kv.TransferParams{DoRemoteDecode: true, TransferID: l.transfer}})
		if err != nil {
			e.c.t.Errorf("%s: %v", e.id, err)
			return
		}
		h.Allocated(time.Now(), l.id, kv.BlockIDs{l.blocks}, 0, 0)
		hold, _ = h.Finished(time.Now(), l.id, reason, kv.BlockIDs{l.blocks}, l.tokens)
	})
	return hold
}

// decodeLeg lets D arrive and, unless computed is negative, register.
func (e *engine) decodeLeg(p *engine, l leg, computed int) {
	e.c.t.Helper()
	e.do(func(h *scheduler.Half) {
		err := h.Arrived(time.Now(), connector.Request{ID: l.id, PromptTokens: l.tokens, Digest: l.digest,
			Params: kv.TransferParams{DoRemotePrefill: true, TransferID: l.transfer, RemoteEngineID: p.id, RemoteRequestID: "client",
				RemoteHost: p.host, RemotePort: 5600, TPSize: p.tp, PPSize: 1}})
		if err != nil {
			e.c.t.Errorf("%s: %v", e.id, err)
		}
		if computed >= 0 {
			h.Allocated(time.Now(), l.id, kv.BlockIDs{l.blocks}, computed, h.External(l.id, computed))
		}
	})
}

func (e *engine) abort(id kv.RequestID) (hold bool) {
	e.do(func(h *scheduler.Half) { hold, _ = h.Finished(time.Now(), id, connector.FinishAbort, nil, 0) })
	return hold
}

// block is the bytes of one block of one layer.
func (r *rank) block(layer int, b kv.BlockID) []byte {
	at := (layer*testBlocks + int(b)) * testBlockLen
	return r.mem[at : at+testBlockLen]
}

// fill writes self-describing KV into blocks: what it is of, which rank, layer and position.
func (e *engine) fill(blocks []kv.BlockID, first int, what uint32) {
	for i, r := range e.ranks {
		for l := range testLayers {
			for j, b := range blocks {
				pattern(r.block(l, b), what, i, l, first+j)
			}
		}
	}
}

func pattern(dst []byte, what uint32, rank, layer, pos int) {
	for at := 0; at < len(dst); at += 8 {
		binary.LittleEndian.PutUint32(dst[at:], what)
		dst[at+4], dst[at+5], dst[at+6], dst[at+7] = byte(rank), byte(layer), byte(pos), byte(at)
	}
}

// holds reports whether the blocks hold exactly what fill writes.
func (e *engine) holds(blocks []kv.BlockID, first int, what uint32) error {
	want := make([]byte, testBlockLen)
	for i, r := range e.ranks {
		for l := range testLayers {
			for j, b := range blocks {
				pattern(want, what, i, l, first+j)
				if got := r.block(l, b); string(got) != string(want) {
					return fmt.Errorf("%s rank %d layer %d block %d (position %d) holds %x, want %x", e.id, i, l, b, first+j, got[:8], want[:8])
				}
			}
		}
	}
	return nil
}

// idle checks that nothing of any request is left on an engine.
func (e *engine) idle() {
	e.c.t.Helper()
	e.do(func(h *scheduler.Half) {
		if s := h.Stats(); s.Requests != 0 || s.Heartbeats != 0 {
			e.c.t.Errorf("%s: the ledger keeps %d requests, %d heartbeats", e.id, s.Requests, s.Heartbeats)
		}
	})
	for i, r := range e.ranks {
		s := r.worker.Stats()
		if s.Receiving != 0 || s.Held != 0 || s.InFlight != 0 {
			e.c.t.Errorf("%s rank %d keeps %d receives, %d holds, %d transfers", e.id, i, s.Receiving, s.Held, s.InFlight)
		}
	}
}

// recorder keeps events.
type recorder struct {
	mu struct {
		sync.Mutex
		events []event.Event
	}
}

func (r *recorder) Emit(e event.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.events = append(r.mu.events, e)
}

func (r *recorder) count(kind string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, e := range r.mu.events {
		if e.Kind() == kind {
			n++
		}
	}
	return n
}

func (r *recorder) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, e := range r.mu.events {
		fmt.Fprintf(&b, "%s %+v\n", e.Kind(), e)
	}
	return b.String()
}

// pipeNet is a network in memory.
type pipeNet struct {
	mu struct {
		sync.Mutex
		hosts map[string]*pipeListener
	}
}

func newPipeNet() *pipeNet {
	n := &pipeNet{}
	n.mu.hosts = make(map[string]*pipeListener)
	return n
}

type pipeListener struct {
	net   *pipeNet
	addr  string
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (n *pipeNet) listen(addr string) *pipeListener {
	l := &pipeListener{net: n, addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
	n.mu.Lock()
	n.mu.hosts[addr] = l
	n.mu.Unlock()
	return l
}

func (n *pipeNet) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	l := n.mu.hosts[addr]
	n.mu.Unlock()
	if l == nil {
		return nil, errors.New("connection refused")
	}
	ours, theirs := net.Pipe()
	select {
	case l.conns <- theirs:
		return ours, nil
	case <-l.done:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *pipeListener) Close() error    { l.once.Do(func() { close(l.done) }); return nil }
func (l *pipeListener) Addr() net.Addr  { return l }
func (l *pipeListener) Network() string { return "pipe" }
func (l *pipeListener) String() string  { return l.addr }

func (l leg) wireBlocks() kv.BlockIDs { return kv.BlockIDs{l.blocks} }
func requestID(s string) kv.RequestID { return kv.RequestID(s) }
