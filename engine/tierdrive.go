package engine

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/engine/core"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	tiercore "github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// tierDriver carries out what the machine wants of the CPU tier. Its goroutine owns the looks that
// wait; the machine's loop and it exchange mailboxes, so that neither waits for the other.
//
//	loop ── commands ──> goroutine ── Lookup, Use, Reserve ──> tier.Manager <── tiers
//	  ^                      │  copies                              │ OnChange: look again
//	  └────── events ────────┴──────> copier ── EndUse, Commit ─────┘
type tierDriver struct {
	m         *tier.Manager
	tiers     []*watchedTier
	copier    *copier
	blockSize int
	log       *slog.Logger
	commands  *mailbox[any]
	events    *mailbox[tierEvent]
	changed   chan struct{} // holds one element when a look may be answered otherwise
	closing   chan struct{}
	ended     chan struct{}

	requests map[uint64]*tierRequest
	looks    []*look // in the order in which they were asked

	notStored atomic.Uint64 // blocks that found no room
	sync      delays        // time of one lookup
	async     delays        // from a lookup that was not decided to its decision
}

// tierEvent is one for the machine. Tokens says, for a TierLoaded, from which tier they are.
type tierEvent struct {
	event  core.Event
	seq    uint64
	tokens map[string]int
}

// tierBegin is core.TierBegin with what the tiers are told of the request.
type tierBegin struct {
	seq uint64
	req tier.Request
}

type tierRequest struct {
	id     kv.RequestID
	refuse error // the tiers do not know it
}

// look is a TierLook that is not answered yet.
type look struct {
	core.TierLook
	keys  []tiercore.Key
	since time.Time
	come  int // of the first keys, as was told
}

func newTierDriver(blockSize int, log *slog.Logger) *tierDriver {
	return &tierDriver{
		blockSize: blockSize, log: log,
		commands: newMailbox[any](), events: newMailbox[tierEvent](),
		changed: make(chan struct{}, 1), closing: make(chan struct{}), ended: make(chan struct{}),
		requests: map[uint64]*tierRequest{},
	}
}

// start begins to work with a Manager whose OnChange is onChange.
func (d *tierDriver) start(m *tier.Manager, tiers []*watchedTier, cache *model.Cache) {
	d.m, d.tiers, d.copier = m, tiers, newCopier(m, cache)
	go d.run()
}

func (d *tierDriver) onChange() { notify(d.changed) }

func (d *tierDriver) run() {
	defer close(d.ended)
	for {
		select {
		case <-d.commands.wake:
			d.carryOut()
		case <-d.changed:
			d.lookAgain()
		case <-d.closing:
			d.carryOut()
			return
		}
	}
}

func (d *tierDriver) carryOut() {
	for _, c := range d.commands.take() {
		switch c := c.(type) {
		case tierBegin:
			r := &tierRequest{id: c.req.ID, refuse: d.m.Begin(c.req)}
			if r.refuse != nil {
				d.log.Warn("the CPU tier does not take a request", slog.Any("error", r.refuse))
			}
			d.requests[c.seq] = r
		case core.TierLook:
			l := &look{TierLook: c, keys: tierKeys(c.Keys), since: time.Now()}
			if !d.try(l) {
				d.looks = append(d.looks, l)
			}
		case core.TierForget:
			d.looks = slices.DeleteFunc(d.looks, func(l *look) bool { return l.Ticket == c.Ticket })
		case core.TierLoad:
			d.load(c)
		case core.TierStore:
			d.store(c)
		case core.TierEnd:
			d.looks = slices.DeleteFunc(d.looks, func(l *look) bool { return l.Seq == c.Seq })
			if d.requests[c.Seq].refuse == nil {
				d.m.Touch(tierKeys(c.Keys))
				d.m.Finish(d.requests[c.Seq].id)
			}
			delete(d.requests, c.Seq)
		case core.TierReset:
			d.m.Reset()
		}
	}
}

func (d *tierDriver) lookAgain() {
	d.looks = slices.DeleteFunc(d.looks, func(l *look) bool {
		if !d.try(l) {
			return false
		}
		d.async.observe(time.Since(l.since))
		return true
	})
}

// try answers a look if all is known up to the first block that is nowhere. What lies behind that one
// is of no use: it is not asked for again, and no tier brings it (tier.Request.Prefix).
func (d *tierDriver) try(l *look) bool {
	begin := time.Now()
	verdicts := d.m.Lookup(d.requests[l.Seq].id, l.keys)
	d.sync.observe(time.Since(begin))
	if i := slices.Index(verdicts, tiercore.Miss); i >= 0 {
		verdicts, l.keys = verdicts[:i], l.keys[:i]
	}
	if i := slices.IndexFunc(verdicts, func(v tiercore.Verdict) bool { return v != tiercore.Hit }); i >= 0 {
		if i > l.come {
			l.come = i
			d.events.put(tierEvent{event: core.TierProgress{Ticket: l.Ticket, Blocks: i}})
		}
		return false
	}
	d.events.put(tierEvent{event: core.TierFound{Ticket: l.Ticket, Blocks: len(l.keys)}})
	return true
}

// load copies blocks into the KV cache: as many of the first ones as are there. Some may have been
// evicted since they were found.
func (d *tierDriver) load(c core.TierLoad) {
	keys := tierKeys(c.Keys)
	lease, slots, ok := d.m.Use(keys)
	if !ok {
		keys = keys[:d.ready(d.requests[c.Seq].id, keys)]
		if lease, slots, ok = d.m.Use(keys); !ok || len(keys) == 0 {
			keys = nil
		}
	}
	from := d.origin(d.requests[c.Seq].id, keys)
	loaded := tierEvent{event: core.TierLoaded{Ticket: c.Ticket, Blocks: len(keys)}, seq: c.Seq, tokens: from}
	if !ok {
		d.events.put(loaded)
		return
	}
	d.copier.put(copyTask{load: true, blocks: c.Blocks, slots: slots, done: func() {
		d.m.EndUse(lease)
		d.events.put(loaded)
	}})
}

// ready is how many of the first keys are in memory now.
func (d *tierDriver) ready(req kv.RequestID, keys []tiercore.Key) int {
	for i, v := range d.m.Lookup(req, keys) {
		if v != tiercore.Hit {
			return i
		}
	}
	return len(keys)
}

// origin says from which tier tokens come: the memory's own are those that no other was to bring.
func (d *tierDriver) origin(req kv.RequestID, keys []tiercore.Key) map[string]int {
	tokens := map[string]int{}
	rest := len(keys)
	for _, w := range d.tiers {
		if n := w.broughtFor(req, keys); n > 0 {
			tokens[w.Name()] = n * d.blockSize
			rest -= n
		}
	}
	if rest > 0 {
		tokens[tierMemory] = rest * d.blockSize
	}
	return tokens
}

// tierMemory names the CPU's memory among the tiers.
const tierMemory = "cpu"

// store copies blocks that the tier does not have into its memory: all, or as many of the first ones as
// find room.
func (d *tierDriver) store(c core.TierStore) {
	stored := func() { d.events.put(tierEvent{event: core.TierStored{Ticket: c.Ticket}}) }
	keys, r := tierKeys(c.Keys), d.requests[c.Seq]
	res, ok := tiercore.Reservation{}, false
	for n := len(keys); n > 0 && !ok && r.refuse == nil; n /= 2 {
		keys = keys[:n]
		res, ok = d.m.Reserve(r.id, keys)
	}
	if !ok {
		keys = nil
	}
	d.notStored.Add(uint64(len(c.Keys) - len(keys)))
	if res.ID == 0 {
		stored()
		return
	}
	blocks := make([]kv.BlockID, len(res.Index))
	for i, at := range res.Index {
		blocks[i] = c.Blocks[at]
	}
	d.copier.put(copyTask{blocks: blocks, slots: res.Slots, done: func() {
		d.m.Commit(res.ID, true)
		stored()
	}})
}

// close ends the goroutines, after what they were told is done, and the tiers. Until ctx ends it waits
// for those to keep what they were given. Nothing touches the KV cache afterwards.
func (d *tierDriver) close(ctx context.Context) error {
	close(d.closing)
	<-d.ended
	d.copier.close()
	for d.m.Stats().Stores > 0 && ctx.Err() == nil {
		select {
		case <-d.changed:
		case <-ctx.Done():
		}
	}
	return d.m.Close()
}

// tierKeys are the keys of blocks of the one KV-cache group, 0 (p2p-tier.md, section 1.1).
func tierKeys(hashes []core.Hash) []tiercore.Key {
	keys := make([]tiercore.Key, len(hashes))
	for i, h := range hashes {
		keys[i] = tiercore.Key(h[:]) + "\x00\x00\x00\x00"
	}
	return keys
}

// tierRequestOf tells the tiers of a request. Its id there is its own: ids of requests come back.
func tierRequestOf(seq uint64, p *wire.P2PParams) tier.Request {
	r := tier.Request{ID: kv.RequestID(strconv.FormatUint(seq, 10)), LoadOnlyFrom: loadOnlyFrom(p.LoadTiers), Prefix: true}
	from := p.Source
	if p.Prefiller != nil {
		from = p.Prefiller
	}
	if from != nil {
		r.Source = &tier.Source{Host: from.Host, Port: from.Port, KVRequestID: from.ID, Everything: p.Prefiller != nil}
	}
	if p.Decoder != "" {
		r.Decoder = &tier.Decoder{KVRequestID: p.Decoder}
	}
	return r
}

// loadOnlyFrom names the tiers that kv_load_tiers allows. Files are local storage; peers have neither
// medium nor locality and match every matcher, as in stock.
func loadOnlyFrom(matches []wire.TierMatch) []string {
	if matches == nil {
		return nil
	}
	names := []string{}
	if len(matches) > 0 {
		names = append(names, TierP2P)
	}
	if slices.ContainsFunc(matches, func(m wire.TierMatch) bool {
		return (m.Medium == "" || m.Medium == "STORAGE") && (m.Locality == "" || m.Locality == "LOCAL")
	}) {
		names = append(names, TierFS)
	}
	return names
}
