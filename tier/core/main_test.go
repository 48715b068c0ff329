package core

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/kvferry/kvferry/kv"
)

// TestScenarios runs the files in testdata: each line of input is a call, the output is what it
// returned and every job that was given out.
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		s := &script{tiers: map[int]map[Key]Verdict{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.out.Reset()
			for _, line := range strings.Split(d.Input, "\n") {
				s.line(t, strings.Fields(line))
			}
			return s.out.String()
		})
	})
}

type script struct {
	m     *Machine
	tiers map[int]map[Key]Verdict
	out   strings.Builder
}

func (s *script) Probe(t int, _ kv.RequestID, k Key) Verdict { return s.tiers[t][k] }

func (s *script) line(t *testing.T, f []string) {
	num := func(i int) (n int) {
		if _, err := fmt.Sscan(f[i], &n); err != nil {
			t.Fatalf("%v: %v", f, err)
		}
		return n
	}
	keys := func(from int) (ks []Key) {
		for _, k := range f[from:] {
			ks = append(ks, Key(k))
		}
		return ks
	}
	var err error
	switch f[0] {
	case "new": // slots tiers [blocks for peers]
		cfg := Config{Slots: num(1), Tiers: num(2)}
		if len(f) > 3 {
			cfg.PeerPins = num(3)
		}
		s.m, err = New(cfg)
	case "has": // tier verdict keys…
		if s.tiers[num(1)] == nil {
			s.tiers[num(1)] = map[Key]Verdict{}
		}
		for _, k := range keys(3) {
			s.tiers[num(1)][k] = map[string]Verdict{"miss": Miss, "pending": Pending, "hit": Hit}[f[2]]
		}
	case "begin": // req [prefix] [whole=tier] [noload=tier]
		spec := RequestSpec{Whole: make([]bool, MaxTiers), NoLoad: make([]bool, MaxTiers)}
		for _, o := range f[2:] {
			var tier int
			if n, _ := fmt.Sscanf(o, "whole=%d", &tier); n == 1 {
				spec.Whole[tier] = true
			} else if o == "prefix" {
				spec.Prefix = true
			} else if n, _ := fmt.Sscanf(o, "noload=%d", &tier); n == 1 {
				spec.NoLoad[tier] = true
			} else {
				t.Fatalf("option %q", o)
			}
		}
		s.m.Begin(kv.RequestID(f[1]), spec)
	case "lookup": // req keys…
		fmt.Fprintln(&s.out, s.m.Lookup(kv.RequestID(f[1]), keys(2), s))
	case "serve": // tier keys…
		for i, a := range s.m.Serve(num(1), keys(2), len(keys(2)), s) {
			fmt.Fprintf(&s.out, "%s: %v", f[2+i], a.Verdict)
			if a.Verdict == Hit {
				fmt.Fprintf(&s.out, " in slot %d, pin %d", a.Slot, a.Pin)
			}
			if a.Later {
				fmt.Fprint(&s.out, " for now")
			}
			fmt.Fprintln(&s.out)
		}
	case "unpin":
		s.m.Unpin([]PinID{PinID(num(1))})
	case "use": // keys…
		id, slots, ok := s.m.Use(keys(1))
		fmt.Fprintf(&s.out, "ok=%v lease %d slots %v\n", ok, id, slots)
	case "end-use":
		s.m.EndUse(JobID(num(1)))
	case "reserve": // req keys…
		res, ok := s.m.Reserve(kv.RequestID(f[1]), keys(2))
		fmt.Fprintf(&s.out, "ok=%v lease %d for %v slots %v\n", ok, res.ID, res.Index, res.Slots)
	case "commit": // lease ok
		s.m.Commit(JobID(num(1)), f[2] == "ok")
	case "load-ended": // job good|bad… [running]
		var good []bool
		stopped := true
		for _, g := range f[2:] {
			if g == "running" {
				stopped = false
				continue
			}
			good = append(good, g == "good")
		}
		s.m.LoadEnded(JobID(num(1)), good, stopped)
	case "load-stopped":
		s.m.LoadStopped(JobID(num(1)))
	case "store-ended": // job ok
		s.m.StoreEnded(JobID(num(1)), f[2] == "ok")
	case "finish":
		s.m.Finish(kv.RequestID(f[1]))
	case "reset":
		s.m.Reset()
	case "stats":
		st := s.m.Stats()
		fmt.Fprintf(&s.out, "free=%d writing=%d ready=%d pinned=%d quarantined=%d requests=%d loads=%d stores=%d strays=%d evicted=%d\n",
			st.Free, st.Writing, st.Ready, st.Pinned, st.Quarantined, st.Requests, st.Loads, st.Stores, st.Strays, st.Evicted)
	default:
		t.Fatalf("unknown line %v", f)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range s.m.Actions() {
		switch a := a.(type) {
		case Load:
			fmt.Fprintf(&s.out, "  tier %d: load job %d %q into %v for %q\n", a.Tier, a.Job.ID, a.Job.Keys, a.Job.Slots, a.Job.Req)
		case Store:
			fmt.Fprintf(&s.out, "  tier %d: store job %d %q from %v for %q\n", a.Tier, a.Job.ID, a.Job.Keys, a.Job.Slots, a.Job.Req)
		case Unwanted:
			fmt.Fprintf(&s.out, "  tier %d: %q has no use for %q\n", a.Tier, a.Req, a.Keys)
		case End:
			fmt.Fprintf(&s.out, "  tier %d: end of %q\n", a.Tier, a.Req)
		}
	}
}
