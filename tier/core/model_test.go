package core

import (
	"fmt"
	"slices"
	"sort"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/kv"
)

// dumb is the tier as a list that is searched from the start every time.
type dumb struct {
	slots, tiers, quota int
	clock               int
	list                []*entry
	reqs                map[kv.RequestID]*dumbReq
	jobs                map[string][]*dumbJob // by what they are, in words; equal ones in order
	pins                int
	quarantined         int
	said                []string
	peerLoads           int // blocks that are loaded for peers
}

type entry struct {
	key   Key
	state string // writing, ready
	pins  int
	last  int
	lost  bool // no longer found by its key
	wants []parked
}

type dumbReq struct {
	whole, noLoad, noStore []bool
	through, prefix        bool
	pending                int
	finished               bool
	failed                 map[string]bool
}

type dumbJob struct {
	kind    string
	tier    int
	req     kv.RequestID
	entries []*entry
}

func (d *dumb) find(k Key) *entry {
	for _, e := range d.list {
		if e.key == k && !e.lost {
			return e
		}
	}
	return nil
}

func (d *dumb) remove(e *entry) {
	d.list = slices.DeleteFunc(d.list, func(x *entry) bool { return x == e })
}

// room makes place for n blocks, or changes nothing.
func (d *dumb) room(n int, keep []Key) bool {
	var can []*entry
	for _, e := range d.list {
		if e.state == "ready" && e.pins == 0 && !e.lost && !slices.Contains(keep, e.key) {
			can = append(can, e)
		}
	}
	sort.Slice(can, func(i, j int) bool { return can[i].last < can[j].last })
	free := d.slots - len(d.list) - d.quarantined
	if n > free+len(can) {
		return false
	}
	for i := 0; i < n-free; i++ {
		d.remove(can[i])
	}
	return true
}

func (d *dumb) add(keys []Key) []*entry {
	out := make([]*entry, len(keys))
	for i := len(keys) - 1; i >= 0; i-- {
		d.clock++
		out[i] = &entry{key: keys[i], state: "writing", last: d.clock}
	}
	d.list = append(d.list, out...)
	return out
}

func (d *dumb) lookup(req kv.RequestID, exclude int, keys []Key, has func(int, Key) Verdict) []Verdict {
	r := d.reqs[req]
	if r == nil || !r.prefix {
		out, _ := d.serve(req, exclude, keys, len(keys), has)
		return out
	}
	return d.prefix(req, r, keys, has)
}

// prefix is lookup where nothing is brought, or asked for, from the first miss on.
func (d *dumb) prefix(req kv.RequestID, r *dumbReq, keys []Key, has func(int, Key) Verdict) []Verdict {
	out := make([]Verdict, len(keys))
	loads := make([][]*entry, d.tiers)
	miss := -1
	for i := 0; i < len(keys) && miss < 0; i++ {
		k := keys[i]
		if e := d.find(k); e != nil {
			out[i] = map[bool]Verdict{true: Hit, false: Pending}[e.state == "ready"]
			continue
		}
		for t := range d.tiers {
			if r.noLoad[t] || r.failed[fmt.Sprint(t, k)] {
				continue
			}
			v := has(t, k)
			if v == Hit {
				out[i] = Miss
				if d.room(1, keys) {
					out[i] = Pending
					loads[t] = append(loads[t], d.add([]Key{k})...)
				}
				break
			}
			if v == Pending {
				out[i] = Pending
			}
		}
		if out[i] == Miss {
			miss = i
		}
	}
	for t, l := range loads {
		if l != nil {
			d.job("load", t, req, l)
		}
	}
	for t := range d.tiers {
		if miss >= 0 && miss+1 < len(keys) && !r.noLoad[t] {
			d.said = append(d.said, fmt.Sprintf("unwanted tier=%d req=%s %q", t, req, keys[miss+1:]))
		}
	}
	return out
}

// serve is lookup; for a peer, of most blocks. refused are those that it would have got otherwise.
func (d *dumb) serve(req kv.RequestID, exclude int, keys []Key, most int, has func(int, Key) Verdict) ([]Verdict, []bool) {
	var r *dumbReq
	out, refused := make([]Verdict, len(keys)), make([]bool, len(keys))
	if exclude < 0 {
		if r = d.reqs[req]; r == nil {
			return out, refused
		}
	}
	full := func(loads [][]*entry) bool {
		if exclude < 0 {
			return false
		}
		n := d.pins + d.peerLoads
		for _, l := range loads {
			n += len(l)
		}
		return n >= d.quota || most == 0
	}
	loads := make([][]*entry, d.tiers)
	for i, k := range keys {
		if e := d.find(k); e != nil {
			out[i] = Pending
			if e.state == "ready" {
				out[i] = Hit
				if exclude >= 0 {
					if full(loads) {
						out[i], refused[i] = Miss, true
					} else {
						e.pins++
						d.pins++
						most--
					}
				}
			}
			continue
		}
		for t := range d.tiers {
			if t == exclude || r != nil && (r.noLoad[t] || r.failed[fmt.Sprint(t, k)]) {
				continue
			}
			v := has(t, k)
			if v == Hit {
				out[i] = Miss
				if refused[i] = full(loads); !refused[i] && d.room(1, keys) {
					most--
					out[i] = Pending
					loads[t] = append(loads[t], d.add([]Key{k})...)
				}
				break
			}
			if v == Pending {
				out[i] = Pending
			}
		}
	}
	for t, l := range loads {
		if l != nil {
			d.job("load", t, req, l)
			if exclude >= 0 {
				d.peerLoads += len(l)
			}
		}
	}
	return out, refused
}

func (d *dumb) job(kind string, tier int, req kv.RequestID, es []*entry) {
	name := fmt.Sprintf("%s tier=%d req=%s", kind, tier, req)
	for _, e := range es {
		name += " " + string(e.key)
	}
	d.said = append(d.said, name)
	d.jobs[name] = append(d.jobs[name], &dumbJob{kind, tier, req, es})
}

func (d *dumb) store(tier int, req kv.RequestID, es []*entry) {
	var live []*entry
	for _, e := range es {
		if e.state == "ready" && !e.lost {
			live = append(live, e)
			e.pins++
		}
	}
	if len(live) > 0 {
		d.job("store", tier, req, live)
	}
}

func (d *dumb) finish(e *entry, ok bool) {
	if ok && !e.lost {
		e.state = "ready"
	} else {
		e.lost = true
		d.remove(e)
	}
	d.unwant(e, ok)
}

func (d *dumb) unwant(e *entry, ok bool) {
	wants := e.wants
	e.wants = nil
	for _, w := range wants {
		if ok {
			d.store(w.tier, w.req, []*entry{e})
		}
		d.reqs[w.req].pending--
		d.retire(w.req)
	}
}

func (d *dumb) retire(req kv.RequestID) {
	if r := d.reqs[req]; r != nil && r.finished && r.pending == 0 {
		delete(d.reqs, req)
		for t := range d.tiers {
			d.said = append(d.said, fmt.Sprintf("end tier=%d req=%s", t, req))
		}
	}
}

func (d *dumb) unpin(e *entry) {
	e.pins--
	if e.pins == 0 && e.lost {
		d.remove(e)
	}
}

// words says an action as the dumb model does.
func words(a Action) (string, JobID) {
	say := func(kind string, tier int, j Job) (string, JobID) {
		s := fmt.Sprintf("%s tier=%d req=%s", kind, tier, j.Req)
		for _, k := range j.Keys {
			s += " " + string(k)
		}
		return s, j.ID
	}
	switch a := a.(type) {
	case Load:
		return say("load", a.Tier, a.Job)
	case Store:
		return say("store", a.Tier, a.Job)
	case End:
		return fmt.Sprintf("end tier=%d req=%s", a.Tier, a.Req), 0
	case Unwanted:
		return fmt.Sprintf("unwanted tier=%d req=%s %q", a.Tier, a.Req, a.Keys), 0
	}
	panic("unknown action")
}

type probeFunc func(int, Key) Verdict

func (f probeFunc) Probe(t int, _ kv.RequestID, k Key) Verdict { return f(t, k) }

// Whatever is asked of it, the tier answers as the dumb model does, holds the same blocks, and gives
// out the same jobs.
func TestMachineMatchesModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { newWorld(t).run() })
}

type world struct {
	t      *rapid.T
	m      *Machine
	d      *dumb
	ids    map[JobID]*dumbJob // jobs in flight
	leases map[JobID][]*entry
	writes map[JobID]*dumbJob
	halted map[JobID]int
	pins   map[PinID]*entry
	next   int
}

func newWorld(t *rapid.T) *world {
	slots, tiers := rapid.IntRange(1, 6).Draw(t, "slots"), rapid.IntRange(0, 2).Draw(t, "tiers")
	quota := rapid.IntRange(1, slots).Draw(t, "quota")
	m, err := New(Config{Slots: slots, Tiers: tiers, PeerPins: quota})
	if err != nil {
		t.Fatal(err)
	}
	return &world{t: t, m: m,
		d:   &dumb{slots: slots, tiers: tiers, quota: quota, reqs: map[kv.RequestID]*dumbReq{}, jobs: map[string][]*dumbJob{}},
		ids: map[JobID]*dumbJob{}, leases: map[JobID][]*entry{}, writes: map[JobID]*dumbJob{}, halted: map[JobID]int{}, pins: map[PinID]*entry{}}
}

func (w *world) run() {
	w.t.Repeat(map[string]func(*rapid.T){
		"begin": w.begin, "finish": w.finish, "lookup": w.lookup, "serve": w.serve, "unpin": w.unpin,
		"use": w.use, "touch": w.touch, "end use": w.endUse, "reserve": w.reserve, "commit": w.commit,
		"end job": w.endJob, "stop": w.stop, "stray": w.stray, "reset": w.reset,
		"": func(t *rapid.T) { w.compare(t) },
	})
}

func (w *world) keys(t *rapid.T) []Key {
	return rapid.SliceOfN(rapid.SampledFrom([]Key{"a", "b", "c", "d", "e", "f", "g"}), 1, 4).Draw(t, "keys")
}

func (w *world) req(t *rapid.T) kv.RequestID {
	ids := make([]string, 0, len(w.d.reqs))
	for id := range w.d.reqs {
		ids = append(ids, string(id))
	}
	sort.Strings(ids)
	return kv.RequestID(rapid.SampledFrom(append(ids, "nobody")).Draw(t, "req"))
}

// has draws what each tier says of a key during one call.
func (w *world) has(t *rapid.T) func(int, Key) Verdict {
	said := map[string]Verdict{}
	return func(tier int, k Key) Verdict {
		name := fmt.Sprint(tier, k)
		if v, ok := said[name]; ok {
			return v
		}
		said[name] = rapid.SampledFrom([]Verdict{Miss, Pending, Hit}).Draw(t, "tier says")
		return said[name]
	}
}

func pick[K JobID | PinID, V any](t *rapid.T, m map[K]V) K {
	if len(m) == 0 {
		t.Skip("none")
	}
	ids := make([]K, 0, len(m))
	for id := range m {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return rapid.SampledFrom(ids).Draw(t, "which")
}

func (w *world) begin(t *rapid.T) {
	w.next++
	id := kv.RequestID(fmt.Sprint("r", w.next))
	flags := func(name string) []bool { return rapid.SliceOfN(rapid.Bool(), w.d.tiers, w.d.tiers).Draw(t, name) }
	whole, noLoad, noStore := flags("whole"), flags("no load"), flags("no store")
	through, prefix := rapid.Bool().Draw(t, "through"), rapid.Bool().Draw(t, "prefix")
	if !w.m.Begin(id, RequestSpec{Whole: whole, NoLoad: noLoad, NoStore: noStore, Through: through, Prefix: prefix}) {
		t.Fatal("refused")
	}
	if w.m.Begin(id, RequestSpec{}) {
		t.Fatal("begun twice")
	}
	w.d.reqs[id] = &dumbReq{whole: whole, noLoad: noLoad, noStore: noStore, through: through, prefix: prefix, failed: map[string]bool{}}
}

func (w *world) finish(t *rapid.T) {
	id := w.req(t)
	w.m.Finish(id)
	if r := w.d.reqs[id]; r != nil {
		r.finished = true
		w.d.retire(id)
	}
}

func (w *world) lookup(t *rapid.T) {
	id, keys, has := w.req(t), w.keys(t), w.has(t)
	want := w.d.lookup(id, -1, keys, has)
	if d := cmp.Diff(want, w.m.Lookup(id, keys, probeFunc(has))); d != "" {
		t.Fatal(d)
	}
}

func (w *world) serve(t *rapid.T) {
	tier, keys, has := rapid.IntRange(0, 2).Draw(t, "tier"), w.keys(t), w.has(t)
	most := rapid.IntRange(0, 3).Draw(t, "most")
	before := w.d.peerLoads
	want, later := w.d.serve("", tier, keys, most, has)
	promoted := 0
	for i, s := range w.m.Serve(tier, keys, most, probeFunc(has)) {
		if s.Promoted {
			promoted++
		}
		if s.Verdict != want[i] || s.Later != later[i] {
			t.Fatalf("%s: %v, later %v; want %v, %v", keys[i], s.Verdict, s.Later, want[i], later[i])
		}
		if s.Verdict == Hit {
			w.pins[s.Pin] = w.d.find(keys[i])
		}
	}
	if loads := w.d.peerLoads - before; promoted != loads {
		t.Fatalf("%d are charged, %d are loaded", promoted, loads)
	}
}

func (w *world) unpin(t *rapid.T) {
	id := pick(t, w.pins)
	w.m.Unpin([]PinID{id})
	w.d.unpin(w.pins[id])
	w.d.pins--
	delete(w.pins, id)
}

func (w *world) touch(t *rapid.T) {
	keys := w.keys(t)
	w.m.Touch(keys)
	for i := len(keys) - 1; i >= 0; i-- {
		if e := w.d.find(keys[i]); e != nil {
			w.d.clock++
			e.last = w.d.clock
		}
	}
}

func (w *world) use(t *rapid.T) {
	keys := w.keys(t)
	id, slots, ok := w.m.Use(keys)
	want := true
	for _, k := range keys {
		e := w.d.find(k)
		want = want && e != nil && e.state == "ready"
	}
	if ok != want || ok && len(slots) != len(keys) {
		t.Fatalf("use of %v: %v, want %v", keys, ok, want)
	}
	if !ok {
		return
	}
	for i := len(keys) - 1; i >= 0; i-- {
		e := w.d.find(keys[i])
		e.pins++
		w.d.clock++
		e.last = w.d.clock
		w.leases[id] = append(w.leases[id], e)
	}
}

func (w *world) endUse(t *rapid.T) {
	id := pick(t, w.leases)
	w.m.EndUse(id)
	for _, e := range w.leases[id] {
		w.d.unpin(e)
	}
	delete(w.leases, id)
}

func (w *world) reserve(t *rapid.T) {
	id, keys := w.req(t), w.keys(t)
	res, ok := w.m.Reserve(id, keys)
	r := w.d.reqs[id]
	if r == nil || r.finished {
		if ok {
			t.Fatal("a request that is over reserved")
		}
		return
	}
	var fresh, distinct []Key
	for _, k := range keys {
		if !slices.Contains(distinct, k) {
			distinct = append(distinct, k)
			if w.d.find(k) == nil {
				fresh = append(fresh, k)
			}
		}
	}
	if want := w.d.room(len(fresh), keys); ok != want {
		t.Fatalf("reserve of %v: %v, want %v", keys, ok, want)
	}
	if !ok {
		return
	}
	for tier := range w.d.tiers {
		if !r.whole[tier] {
			continue
		}
		var now []*entry
		for _, k := range distinct {
			switch e := w.d.find(k); {
			case e == nil:
			case e.state == "ready":
				now = append(now, e)
			default:
				e.wants = append(e.wants, parked{id, tier})
				r.pending++
			}
		}
		w.d.store(tier, id, now)
	}
	var got []Key
	for _, i := range res.Index {
		got = append(got, keys[i])
	}
	if d := cmp.Diff(fresh, got); d != "" || len(res.Slots) != len(fresh) {
		t.Fatal(d, res.Slots)
	}
	if len(fresh) > 0 {
		r.pending++
		w.writes[res.ID] = &dumbJob{"write", -1, id, w.d.add(fresh)}
	}
}

func (w *world) commit(t *rapid.T) {
	id := pick(t, w.writes)
	ok := rapid.Bool().Draw(t, "ok")
	w.m.Commit(id, ok)
	j := w.writes[id]
	delete(w.writes, id)
	for _, e := range j.entries {
		w.d.finish(e, ok)
	}
	for tier := range w.d.tiers {
		if ok && !w.d.reqs[j.req].noStore[tier] {
			w.d.store(tier, j.req, j.entries)
		}
	}
	w.d.reqs[j.req].pending--
	w.d.retire(j.req)
}

func (w *world) endJob(t *rapid.T) {
	id := pick(t, w.ids)
	j := w.ids[id]
	delete(w.ids, id)
	if j.kind == "store" {
		w.m.StoreEnded(id, rapid.Bool().Draw(t, "ok"))
		for _, e := range j.entries {
			w.d.unpin(e)
		}
		return
	}
	good := rapid.SliceOfN(rapid.Bool(), 0, len(j.entries)).Draw(t, "good")
	stopped := rapid.Bool().Draw(t, "stopped")
	w.m.LoadEnded(id, good, stopped)
	if j.req == "" {
		w.d.peerLoads -= len(j.entries)
	}
	held := 0
	var whole []*entry
	owner := w.d.reqs[j.req]
	for i, e := range j.entries {
		ok := i < len(good) && good[i]
		if ok {
			whole = append(whole, e)
		}
		if r := w.d.reqs[j.req]; !ok && r != nil {
			r.failed[fmt.Sprint(j.tier, e.key)] = true
		}
		if !ok && !stopped {
			held++
			w.d.quarantined++
		}
		w.d.finish(e, ok)
	}
	for tier := range w.d.tiers {
		if owner != nil && owner.through && tier != j.tier && !owner.noStore[tier] {
			w.d.store(tier, j.req, whole)
		}
	}
	if !stopped {
		w.halted[id] = held
	}
}

func (w *world) stop(t *rapid.T) {
	id := pick(t, w.halted)
	w.m.LoadStopped(id)
	w.d.quarantined -= w.halted[id]
	delete(w.halted, id)
}

// stray ends jobs that are not there: nothing happens but a count.
func (w *world) stray(t *rapid.T) {
	before := w.m.Stats().Strays
	w.m.LoadEnded(1<<40, []bool{true}, true)
	w.m.StoreEnded(1<<40, true)
	w.m.LoadStopped(1 << 40)
	w.m.Commit(1<<40, true)
	w.m.EndUse(1 << 40)
	w.m.Unpin([]PinID{1 << 40})
	if got := w.m.Stats().Strays - before; got != 6 {
		t.Fatalf("%d strays were counted, want 6", got)
	}
}

func (w *world) reset(t *rapid.T) {
	if rapid.IntRange(0, 9).Draw(t, "rarely") != 0 {
		return // a Skip after a draw would end the sequence
	}
	w.m.Reset()
	for _, e := range slices.Clone(w.d.list) {
		if e.lost {
			continue
		}
		w.d.unwant(e, false)
		e.lost = true
		if e.state == "ready" && e.pins == 0 {
			w.d.remove(e)
		}
	}
}

func (w *world) compare(t *rapid.T) {
	var got []string
	for _, a := range w.m.Actions() {
		s, id := words(a)
		got = append(got, s)
		if jobs := w.d.jobs[s]; id != 0 && len(jobs) > 0 {
			w.ids[id], w.d.jobs[s] = jobs[0], jobs[1:]
		}
	}
	want := w.d.said
	w.d.said = nil
	// Promises that end together are told in no particular order.
	sort.Strings(got)
	sort.Strings(want)
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
	var wantKeys, gotKeys []string
	for _, e := range w.d.list {
		if !e.lost {
			wantKeys = append(wantKeys, fmt.Sprint(e.key, " ", e.state, " ", e.pins))
		}
	}
	for k, b := range w.m.pool.index {
		gotKeys = append(gotKeys, fmt.Sprint(k, " ", map[blockState]string{writing: "writing", ready: "ready"}[b.state], " ", b.pins))
	}
	sort.Strings(wantKeys)
	sort.Strings(gotKeys)
	if d := cmp.Diff(wantKeys, gotKeys); d != "" {
		t.Fatal(d)
	}
	s := w.m.Stats()
	if free := w.d.slots - len(w.d.list) - w.d.quarantined; s.Free != free || s.Quarantined != w.d.quarantined || s.PeerPins != w.d.pins {
		t.Fatalf("%d free, %d in quarantine, %d pins; want %d, %d, %d", s.Free, s.Quarantined, s.PeerPins, free, w.d.quarantined, w.d.pins)
	}
	if used := s.Ready + s.Writing + s.Loads + s.Stores + s.Leases + s.PeerPins + s.Quarantined; w.m.Empty() != (used == 0 && len(w.halted) == 0) {
		t.Fatalf("empty %v: %+v", w.m.Empty(), s)
	}
	if n := len(w.m.pool.spared); n > 0 {
		t.Fatalf("%d blocks are kept from eviction for nobody", n)
	}
	w.slots(t)
}

// slots checks that no slot has two owners.
func (w *world) slots(t *rapid.T) {
	owner := map[Slot]string{}
	take := func(s Slot, who string) {
		if owner[s] != "" {
			t.Fatalf("slot %d belongs to %s and %s", s, owner[s], who)
		}
		owner[s] = who
	}
	for _, s := range w.m.pool.free {
		take(s, "nobody")
	}
	seen := map[*block]bool{}
	for k, b := range w.m.pool.index {
		take(b.slot, string(k))
		seen[b] = true
	}
	for _, j := range w.m.jobs {
		for _, b := range j.blocks {
			if !seen[b] {
				seen[b] = true
				take(b.slot, "a job")
			}
		}
	}
	for _, b := range w.m.pins {
		if !seen[b] {
			seen[b] = true
			take(b.slot, "a pin")
		}
	}
	if len(owner) != w.d.slots {
		t.Fatalf("%d of %d slots have an owner", len(owner), w.d.slots)
	}
}
