package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/tier/fs"
	"github.com/kvferry/kvferry/tier/p2p"
	"github.com/kvferry/kvferry/tier/p2p/session"
	"github.com/kvferry/kvferry/tier/store/intake"
)

// namespace holds the blocks of one model. Its fields up to changed are set by open, before anybody else
// sees them.
type namespace struct {
	s     *Store
	facts Facts
	place int // in the store's table
	port  *p2p.Port

	agent  agent.Agent
	peers  *p2p.Tier
	files  *fs.Tier // nil: none
	blocks *tier.Manager

	changed  chan struct{} // cap 1: the collector has something to look at
	closing  chan struct{}
	settled  chan struct{} // closed by the collector, when all is done after drain
	gathered chan struct{} // closed when the collector has ended

	mu struct {
		sync.Mutex
		intake   *intake.Intake[p2p.Peer]
		draining bool
		open     bool
	}
}

func (s *Store) newNamespace(f Facts, place int) *namespace {
	n := &namespace{
		s: s, facts: f, place: place, port: s.front.NewPort(), changed: make(chan struct{}, 1), closing: make(chan struct{}),
		settled: make(chan struct{}), gathered: make(chan struct{}),
	}
	n.mu.intake = intake.New[p2p.Peer](s.cfg.Intake)
	return n
}

func (n *namespace) dir() string { return filepath.Join(n.s.cfg.Folder, n.facts.ID()) }

// open makes what a namespace consists of. On an error nothing is left of it.
func (n *namespace) open() (err error) {
	cfg := n.s.cfg
	slots := int(cfg.Size / int64(cfg.Namespaces) / int64(n.facts.BlockLen))
	if slots < 1 {
		return fmt.Errorf("a block of %d bytes is more than its share of the memory, %d bytes", n.facts.BlockLen, cfg.Size/int64(cfg.Namespaces))
	}
	if n.agent, err = cfg.Agent(n.place); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.agent.Close())
		}
	}()
	mem, err := n.agent.Alloc(slots * n.facts.BlockLen)
	if err != nil {
		return err
	}
	n.peers, err = p2p.New(p2p.Config{
		Port: n.port, Name: cfg.Name, Agent: n.agent, Base: mem.Addr(), Blocks: slots, BlockLen: n.facts.BlockLen,
		Fingerprint: n.facts.Fingerprint, HashSeed: n.facts.HashSeed, Instance: cfg.Instance, HostID: cfg.HostID,
		Offers: n, PingEvery: cfg.PingEvery, OnNote: n.peerNote,
		// A store's memory has no other use than to serve peers, but none may have all of it.
		Session: session.Config{PeerPins: max(1, slots/peerShareDiv)},
	})
	if err != nil {
		return err
	}
	behind := []tier.Secondary{n.peers}
	if cfg.Folder != "" {
		if err := n.openFiles(); err != nil {
			return err
		}
		behind = append(behind, n.files)
	}
	n.blocks, err = tier.New(tier.Config{
		Memory: mem.Bytes(), BlockLen: n.facts.BlockLen, Secondaries: behind, PeerPins: max(1, slots-slots/intakeShareDiv), OnChange: n.wake,
	})
	if err != nil {
		return err
	}
	n.tellOpen(slots)
	go n.collect()
	n.mu.Lock()
	n.mu.open = true
	n.mu.Unlock()
	return nil
}

// openFiles prepares the folder. The tier itself is started by the Manager.
func (n *namespace) openFiles() (err error) {
	if err := os.MkdirAll(n.dir(), 0o700); err != nil {
		return err
	}
	if _, err := readRecord(filepath.Join(n.dir(), recordName)); err != nil {
		if err := record(n.dir(), n.facts); err != nil {
			return err
		}
	}
	n.files, err = fs.New(fs.Config{
		Root: n.dir(), Facts: n.facts.text(), BlockLen: n.facts.BlockLen, Budget: n.s.cfg.FolderSize / int64(n.s.cfg.Namespaces),
		OnDropped: func(d fs.Dropped) { n.tellDropped(d) },
	})
	return err
}

func (n *namespace) tellOpen(slots int) {
	text := fmt.Sprintf("room for %d blocks of %d bytes in memory", slots, n.facts.BlockLen)
	if n.files != nil {
		r := n.files.Recovery()
		text += fmt.Sprintf("; found %d blocks (%d bytes) in files, dropped %d", r.Blocks, r.Bytes, r.DroppedAll)
		for _, d := range r.Dropped {
			n.tellDropped(d)
		}
		for _, d := range r.Foreign {
			n.note("file_foreign", true, "", "%s: %v", d.Path, d.Reason)
		}
	}
	n.note("namespace_open", false, "", "%s", text)
}

func (n *namespace) tellDropped(d fs.Dropped) {
	n.note("block_dropped", true, "", "%s: %v", d.Path, d.Reason)
}

func (n *namespace) note(what string, bad bool, peer, format string, args ...any) {
	n.s.note(Note{What: what, Namespace: n.facts.ID(), Peer: peer, Bad: bad, Text: fmt.Sprintf(format, args...)})
}

// peerNote passes on what the p2p tier tells.
func (n *namespace) peerNote(x session.Note) { n.note(x.What, false, string(x.Peer), "%s", x.Text) }

// Offered is p2p.Taker, on the tier's loop.
func (n *namespace) Offered(from p2p.Peer, keys []core.Key) {
	n.mu.Lock()
	n.mu.intake.Offer(from, keys)
	n.mu.Unlock()
	n.wake()
}

// Ended is p2p.Taker.
func (n *namespace) Ended(p p2p.Peer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.intake.Gone(p)
}

func (n *namespace) wake() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// fetch is a batch under way; its request is the Manager's.
type fetch struct {
	batch intake.Batch[p2p.Peer]
	req   kv.RequestID
}

// collect is the collector's goroutine: it brings what was offered into the memory. It sleeps until
// something changes; every fetch ends by the p2p tier's deadlines.
func (n *namespace) collect() {
	defer close(n.gathered)
	var underWay []fetch
	for {
		select {
		case <-n.changed:
		case <-n.closing:
			return
		}
		rest := underWay[:0]
		for _, f := range underWay {
			if n.pending(f) {
				rest = append(rest, f)
			} else {
				n.end(f)
			}
		}
		underWay = rest
		for {
			b, ok := n.next()
			if !ok {
				break
			}
			f := fetch{b, kv.RequestID("offer-" + strconv.FormatUint(b.ID, 10))}
			if !n.begin(f) {
				n.over(b.ID)
				continue
			}
			if n.pending(f) {
				underWay = append(underWay, f)
			} else {
				n.end(f)
			}
		}
		n.checkSettled()
	}
}

func (n *namespace) next() (intake.Batch[p2p.Peer], bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.intake.Next(n.inFiles)
}

func (n *namespace) inFiles(k core.Key) bool {
	return n.files != nil && n.files.Probe("", k) == core.Hit
}

func (n *namespace) begin(f fetch) bool {
	return n.blocks.Begin(tier.Request{
		ID: f.req, Source: f.batch.Peer.Source(n.s.cfg.Name + "-" + string(f.req)),
		LoadOnlyFrom: []string{n.peers.Name()}, Through: true,
	}) == nil
}

// pending moves a fetch on, and reports whether some of it is still to come.
func (n *namespace) pending(f fetch) bool {
	for _, v := range n.blocks.Lookup(f.req, f.batch.Keys) {
		if v == core.Pending {
			return true
		}
	}
	return false
}

func (n *namespace) end(f fetch) {
	n.blocks.Finish(f.req)
	n.over(f.batch.ID)
}

func (n *namespace) over(id uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.intake.Ended(id)
}

// drain takes no more offers and waits until what is under way is done: fetches, files, and what peers
// are fetching.
func (n *namespace) drain(ctx context.Context) {
	n.mu.Lock()
	open := n.mu.open
	n.mu.draining = true
	n.mu.intake.Stop()
	n.mu.Unlock()
	if !open {
		return
	}
	n.wake()
	select {
	case <-n.settled:
	case <-ctx.Done():
	}
}

// checkSettled tells drain, once, that nothing is under way.
func (n *namespace) checkSettled() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.mu.draining || n.mu.intake.Stats().Batches > 0 {
		return
	}
	if s := n.blocks.Stats(); s.Loads+s.Stores+s.PeerPins > 0 {
		return
	}
	select {
	case <-n.settled:
	default:
		close(n.settled)
	}
}

// close ends the namespace and frees its memory; its files stay.
func (n *namespace) close() error {
	n.mu.Lock()
	open := n.mu.open
	n.mu.open = false
	n.mu.Unlock()
	n.port.Close()
	if !open {
		return nil
	}
	close(n.closing)
	<-n.gathered
	return errors.Join(n.blocks.Close(), n.agent.Close())
}

// empty reports whether the namespace holds nothing, in memory or files, and nothing is on its way. One that is
// being opened may hold anything.
func (n *namespace) empty() bool {
	n.mu.Lock()
	open, batches := n.mu.open, n.mu.intake.Stats().Batches
	n.mu.Unlock()
	if !open || batches > 0 || !n.blocks.Empty() {
		return false
	}
	return n.files == nil || n.files.Stats().Blocks == 0 && len(n.files.Recovery().Foreign) == 0
}

// stats counts.
func (n *namespace) stats() NamespaceStats {
	out := NamespaceStats{Facts: n.facts, Peers: n.port.Links(), BlockLen: int64(n.facts.BlockLen)}
	n.mu.Lock()
	out.Open, out.Intake = n.mu.open, n.mu.intake.Stats()
	n.mu.Unlock()
	if !out.Open {
		return out
	}
	b := n.blocks.Stats()
	out.Slots, out.Ready, out.Pinned, out.Quarantined = b.Slots, b.Ready, b.Pinned, b.Quarantined
	out.Loads, out.Stores, out.Evicted, out.FailedLoads = b.Loads, b.Stores, b.Evicted, b.FailedLoads
	if n.files != nil {
		f := n.files.Stats()
		out.Files = &f
	}
	return out
}
