package session

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

// script drives one hub by the lines of a file and prints what follows from each.
//
//	new [rigid] [peers=n] [pins=n] [unbound=n] [store=<peer>] [takes-offers]   rigid: the agent cannot revoke
//	+<duration>                                    time passes
//	begin <req> [source=<peer>/<id>] [everything] [decoder=<id>]
//	ask <req> <key>…           fetch <req> <job> <key>:<slot>…
//	supply <req> <job> <key>:<slot>[#<sum>]…               finish <req>
//	served <lookup> <key>=hit:<pin>:<slot>[#<sum>] | <key>=miss | <key>=later | <key>=pending …
//	reports | stats | mute | call | changed | shutdown | pending | deadline
//	up <peer> <gen> [<addr>]   down <peer> <gen>   linkend <peer> <link>
//	admitted <peer> <gen> [failed]                 lost <gen>   torndown <gen>
//	granted <job>              postfailed <transfer>
//	ended <transfer> ok|failed stopped <transfer>
//	<peer>#<link>[@<host>] <message>    a message that came in, see message
//	meet <peer> <link>         a whole handshake with a peer that begin has dialled, or that dials us; not printed
type script struct {
	h   *Hub
	now time.Time
	out strings.Builder
	// reports: the typed events are printed too.
	reports bool
	mute    bool // peers give no sign of life
}

func runScript(t *testing.T, path string) {
	t.Helper()
	s := &script{now: time.Unix(1000, 0)}
	datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
		s.out.Reset()
		for _, line := range strings.Split(d.Input, "\n") {
			s.line(t, line)
		}
		return s.out.String()
	})
}

func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) { runScript(t, path) })
}

// testConnect is what every node says in these tests.
func testConnect(peer string) wire.P2PConnect {
	return wire.P2PConnect{
		PeerID: peer, AgentMetadata: []byte{}, BaseAddr: 1 << 20, NumBlocks: 16, BlockLen: 4096,
		Fingerprint: "f", HashSeed: "s", Extension: &wire.Extension{Version: 1, Instance: "i-" + peer},
	}
}

func (s *script) line(t *testing.T, line string) {
	f := strings.Fields(line)
	num := func(i int) uint64 {
		n, err := strconv.ParseUint(f[i], 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		return n
	}
	agentOf := func(gen uint64) agent.PeerID {
		return agent.PeerID{Name: agent.Name(fmt.Sprint("agent", gen)), Gen: kv.Generation(gen)}
	}
	var ev Event
	switch {
	case f[0] == "new":
		s.fresh(t, f[1:])
		return
	case f[0] == "meet":
		s.meet(t, f[1], num(2))
		return
	case f[0] == "reports":
		s.reports = true
		return
	case f[0] == "mute":
		s.mute = true
		return
	case f[0] == "stats":
		s.stats()
		return
	case f[0] == "pending":
		fmt.Fprintln(&s.out, "pending work:", s.h.PendingWork())
		return
	case f[0] == "deadline":
		at, ok := s.h.Deadline()
		fmt.Fprintf(&s.out, "deadline: %v %v\n", ok, max(0, at.Sub(s.now)))
		return
	case strings.HasPrefix(f[0], "+"):
		d, err := time.ParseDuration(f[0][1:])
		if err != nil {
			t.Fatal(err)
		}
		s.sleep(d)
		return
	case f[0] == "begin":
		b := Begin{Req: kv.RequestID(f[1])}
		for _, o := range f[2:] {
			switch name, value, _ := strings.Cut(o, "="); name {
			case "source":
				peer, id, _ := strings.Cut(value, "/")
				b.Source, b.SourceID = PeerID(peer), id
			case "everything":
				b.Everything = true
			case "decoder":
				b.Decoder, b.DecoderID = true, value
			default:
				t.Fatalf("option %q", o)
			}
		}
		ev = b
	case f[0] == "ask":
		ev = Ask{Req: kv.RequestID(f[1]), Keys: keysOf(f[2:])}
	case f[0] == "decline": // req hits keys…
		ev = Decline{Req: kv.RequestID(f[1]), Hits: int(num(2)), Open: keysOf(f[3:])}
	case f[0] == "fetch":
		keys, slots := placesOf(t, f[3:])
		ev = Fetch{Req: kv.RequestID(f[1]), Job: core.JobID(num(2)), Keys: keys, Slots: slots}
	case f[0] == "supply":
		var sums []core.Sum
		for i, p := range f[3:] {
			p, sum, known := strings.Cut(p, "#")
			n, _ := strconv.ParseUint(sum, 10, 32)
			f[3+i], sums = p, append(sums, core.Sum{CRC: uint32(n), Known: known})
		}
		keys, slots := placesOf(t, f[3:])
		ev = Supply{Req: kv.RequestID(f[1]), Job: core.JobID(num(2)), Keys: keys, Slots: slots, Sums: sums}
	case f[0] == "finish":
		ev = Finish{Req: kv.RequestID(f[1])}
	case f[0] == "served":
		ev = Served{Lookup: num(1), Answers: answersOf(t, f[2:])}
	case f[0] == "call":
		ev = Call{}
	case f[0] == "changed":
		ev = Changed{}
	case f[0] == "shutdown":
		ev = Shutdown{}
	case f[0] == "up":
		u := Up{Peer: PeerID(f[1]), Gen: kv.Generation(num(2))}
		if len(f) > 3 {
			u.Remote = netip.MustParseAddrPort(f[3])
		}
		ev = u
	case f[0] == "down":
		ev = Down{Peer: PeerID(f[1]), Gen: kv.Generation(num(2)), Err: errors.New("refused")}
	case f[0] == "linkend":
		ev = LinkEnded{Identity: f[1], Link: num(2)}
	case f[0] == "admitted":
		a := Admitted{Peer: PeerID(f[1]), Gen: kv.Generation(num(2)), Agent: agentOf(num(2))}
		if len(f) > 3 {
			a.Agent, a.Err = agent.PeerID{}, errors.New("no way to it")
		}
		ev = a
	case f[0] == "lost":
		ev = AgentLost{Agent: agentOf(num(1))}
	case f[0] == "torndown":
		ev = TornDown{Agent: agentOf(num(1)).Name}
	case f[0] == "granted":
		ev = Granted{Job: core.JobID(num(1)), ID: agent.GrantID{byte(num(1))}}
	case f[0] == "postfailed":
		ev = PostFailed{Transfer: num(1), Err: errors.New("refused by the agent")}
	case f[0] == "ended":
		e := TransferEnded{Transfer: num(1), OK: f[2] == "ok"}
		if !e.OK {
			e.Err = errors.New("broken")
		}
		ev = e
	case f[0] == "stopped":
		ev = TransferStopped{Transfer: num(1)}
	case strings.Contains(f[0], "#"):
		peer, link, _ := strings.Cut(f[0], "#")
		link, host, _ := strings.Cut(link, "@")
		n, err := strconv.ParseUint(link, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		m := Message{Identity: peer, Link: n, Host: host}
		if f[1] == "bad" {
			m.Err = map[string]error{"key": wire.ErrP2PBadKey, "ignored": wire.ErrP2PIgnored, "fatal": wire.ErrType}[f[2]]
		} else {
			m.Msg = messageOf(t, peer, f[1:])
		}
		ev = m
	default:
		t.Fatalf("unknown line %q", line)
	}
	s.step(ev)
}

func (s *script) stats() {
	st := s.h.Stats()
	fmt.Fprintf(&s.out, "sessions: %d, open: %d; ended: %v; refused: %v\n", st.Sessions, st.Open, st.Ended, st.Refused)
	for _, p := range slices.Sorted(maps.Keys(st.Peers)) {
		fmt.Fprintf(&s.out, "%q: %+v\n", p, st.Peers[p])
	}
}

func (s *script) fresh(t *testing.T, options []string) {
	s.mute = false
	cfg := Config{Local: testConnect("me:1"), Revocable: true}
	for _, o := range options {
		name, value, _ := strings.Cut(o, "=")
		n, _ := strconv.Atoi(value)
		switch name {
		case "rigid":
			cfg.Revocable = false
		case "peers":
			cfg.MaxPeers = n
		case "pins":
			cfg.PeerPins = n
		case "portion":
			cfg.Portion = n
		case "unbound":
			cfg.UnboundSlots = n
		case "store":
			cfg.Store = PeerID(value)
		case "takes-offers":
			cfg.Local.Extension.Capabilities = []string{wire.CapP2PStore}
		default:
			t.Fatalf("option %q", o)
		}
	}
	var err error
	if s.h, err = New(cfg); err != nil {
		t.Fatal(err)
	}
}

// meet shakes hands.
func (s *script) meet(t *testing.T, peer string, n uint64) {
	kept := s.out.String()
	hello := testConnect(peer)
	hello.Extension.Capabilities = []string{wire.CapP2PLater}
	s.step(Message{Identity: peer, Link: n, Msg: &hello})
	x := s.h.sessions[PeerID(peer)]
	if x == nil {
		t.Fatalf("no session with %s", peer)
	}
	s.step(Up{Peer: PeerID(peer), Gen: x.gen})
	s.step(Admitted{Peer: PeerID(peer), Gen: x.gen, Agent: agent.PeerID{Name: agent.Name(fmt.Sprint("agent", x.gen)), Gen: x.gen}})
	s.out.Reset()
	s.out.WriteString(kept)
	s.step(Message{Identity: peer, Link: n, Msg: wire.P2PConnectAck{PeerID: peer}})
}

// sleep lets time pass as a driver does: from deadline to deadline.
func (s *script) sleep(d time.Duration) {
	end := s.now.Add(d)
	start := s.now
	for {
		at, ok := s.h.Deadline()
		if !ok || at.After(end) {
			break
		}
		s.now = at
		mark := s.out.Len()
		s.step(Tick{})
		if s.out.Len() > mark {
			text := s.out.String()
			s.out.Reset()
			fmt.Fprintf(&s.out, "%safter %v:\n%s", text[:mark], s.now.Sub(start), text[mark:])
		}
	}
	s.now = end
	s.step(Tick{})
}

func (s *script) step(ev Event) {
	for _, a := range s.h.Step(s.now, ev) {
		if p, ok := a.(Probe); ok && !s.mute {
			defer s.step(Alive(p))
			continue
		}
		if r, ok := a.(Report); ok {
			if s.reports {
				fmt.Fprintf(&s.out, "  %s %+v\n", r.Event.Kind(), r.Event)
			}
			continue
		}
		fmt.Fprintf(&s.out, "  %s\n", actionText(a))
	}
}

func keysOf(f []string) []core.Key {
	out := make([]core.Key, len(f))
	for i, k := range f {
		out[i] = core.Key(k)
	}
	return out
}

func placesOf(t *testing.T, f []string) (keys []core.Key, slots []core.Slot) {
	for _, p := range f {
		key, slot, _ := strings.Cut(p, ":")
		n, err := strconv.ParseUint(slot, 10, 32)
		if err != nil {
			t.Fatalf("%s: %v", p, err)
		}
		keys, slots = append(keys, core.Key(key)), append(slots, core.Slot(n))
	}
	return keys, slots
}

func answersOf(t *testing.T, f []string) []core.Served {
	var out []core.Served
	for _, a := range f {
		_, verdict, _ := strings.Cut(a, "=")
		var s core.Served
		switch {
		case verdict == "pending":
			s.Verdict = core.Pending
		case verdict == "promoted":
			s.Verdict, s.Promoted = core.Pending, true
		case verdict == "later":
			s.Later = true
		case strings.HasPrefix(verdict, "hit"):
			s.Verdict = core.Hit
			verdict, sum, known := strings.Cut(verdict, "#")
			if known {
				n, err := strconv.ParseUint(sum, 10, 32)
				if err != nil {
					t.Fatal(err)
				}
				s.Sum = core.Sum{CRC: uint32(n), Known: true}
			}
			if _, err := fmt.Sscanf(verdict, "hit:%d:%d", &s.Pin, &s.Slot); err != nil {
				t.Fatalf("%s: %v", a, err)
			}
		}
		out = append(out, s)
	}
	return out
}

// messageOf reads: connect [seed=] [blocklen=] [fingerprint=] [stock] [store] | ack | disconnect | offer <key>… |
// lookup <id> <round> <key>… | resp <id> <key>=hit|miss|later… | fetch <id> <round> <key>:<index>… |
// done <id> <round> ok|failed [sums=<n>,…] | abort <id> <round> | aborted <id> <round>
func messageOf(t *testing.T, peer string, f []string) wire.P2PMessage {
	round := func() uint64 {
		n, err := strconv.ParseUint(f[2], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	switch f[0] {
	case "connect":
		m := testConnect(peer)
		for _, o := range f[1:] {
			switch name, value, _ := strings.Cut(o, "="); name {
			case "seed":
				m.HashSeed = value
			case "fingerprint":
				m.Fingerprint = value
			case "blocklen":
				n, _ := strconv.ParseUint(value, 10, 64)
				m.BlockLen = n
			case "base":
				n, _ := strconv.ParseUint(value, 0, 64)
				m.BaseAddr = n
			case "instance":
				m.Extension.Instance = value
			case "session", "answers":
				n, _ := strconv.ParseUint(value, 10, 64)
				if name == "session" {
					m.Extension.Session = n
				} else {
					m.Extension.Answers = n
				}
			case "sums":
				m.Extension.Capabilities = []string{wire.CapP2PSums}
			case "stock":
				m.Extension = nil
			case "store":
				m.Extension.Capabilities = []string{wire.CapP2PStore}
			default:
				t.Fatalf("option %q", o)
			}
		}
		return &m
	case "offer":
		return &wire.P2POffer{Keys: keysOf(f[1:])}
	case "offer-many":
		return &wire.P2POffer{Keys: make([]core.Key, maxOfferKeys+1)}
	case "ack":
		return wire.P2PConnectAck{PeerID: peer}
	case "disconnect":
		return wire.P2PDisconnect{}
	case "lookup":
		return &wire.P2PLookup{ID: f[1], Round: round(), Keys: keysOf(f[3:])}
	case "resp":
		m, bounded := &wire.P2PLookupResp{ID: f[1]}, false
		for _, a := range f[2:] {
			key, verdict, _ := strings.Cut(a, "=")
			m.Keys, m.Hits = append(m.Keys, core.Key(key)), append(m.Hits, verdict == "hit")
			if m.Later = append(m.Later, verdict == "later"); verdict == "later" {
				bounded = true
			}
		}
		if !bounded {
			m.Later = nil
		}
		return m
	case "fetch":
		keys, slots := placesOf(t, f[3:])
		m := &wire.P2PFetch{ID: f[1], Round: round(), Keys: keys, Grant: [16]byte{9}}
		for _, s := range slots {
			m.Indexes = append(m.Indexes, uint64(s))
		}
		return m
	case "done":
		m := wire.P2PTransferDone{ID: f[1], Round: round(), Success: f[3] == "ok"}
		if len(f) > 4 {
			for _, n := range strings.Split(strings.TrimPrefix(f[4], "sums="), ",") {
				sum, err := strconv.ParseUint(n, 10, 32)
				if err != nil {
					t.Fatal(err)
				}
				m.Sums = append(m.Sums, uint32(sum))
			}
		}
		return m
	case "abort":
		return wire.P2PAbortFetch{ID: f[1], Round: round()}
	case "aborted":
		return wire.P2PAbortAck{ID: f[1], Round: round()}
	}
	t.Fatalf("unknown message %v", f)
	return nil
}

func messageText(m wire.P2PMessage) string {
	switch m := m.(type) {
	case *wire.P2PConnect:
		if m.Extension.Answers != 0 {
			return fmt.Sprintf("connect, which answers %d", m.Extension.Answers)
		}
		return "connect"
	case *wire.P2PLookup:
		return fmt.Sprintf("lookup %s %d %v", m.ID, m.Round, m.Keys)
	case *wire.P2PLookupResp:
		text := fmt.Sprintf("lookup_resp %s %v %v", m.ID, m.Keys, m.Hits)
		if m.Later != nil {
			text += fmt.Sprintf(" later %v", m.Later)
		}
		return text
	case *wire.P2PFetch:
		return fmt.Sprintf("fetch %s %d %v -> %v grant %d", m.ID, m.Round, m.Keys, m.Indexes, m.Grant[0])
	case *wire.P2POffer:
		return fmt.Sprintf("offer %v", m.Keys)
	case wire.P2PTransferDone:
		return fmt.Sprintf("transfer_done %s %d %v", m.ID, m.Round, m.Success) + sumsText(m.Sums)
	case wire.P2PAbortFetch:
		return fmt.Sprintf("abort_fetch %s %d", m.ID, m.Round)
	case wire.P2PAbortAck:
		return fmt.Sprintf("abort_ack %s %d", m.ID, m.Round)
	}
	return m.Type()
}

func sumsText(sums []uint32) string {
	if sums == nil {
		return ""
	}
	return fmt.Sprintf(" sums %v", sums)
}

func actionText(a Action) string {
	switch a := a.(type) {
	case Dial:
		return fmt.Sprintf("dial %s (%d)", a.Peer, a.Gen)
	case Send:
		return fmt.Sprintf("to %s (%d): %s", a.Peer, a.Gen, messageText(a.Msg))
	case Hang:
		return fmt.Sprintf("hang up %s (%d)", a.Peer, a.Gen)
	case Probe:
		return fmt.Sprintf("probe %s (%d)", a.Peer, a.Gen)
	case DropLink:
		return fmt.Sprintf("drop link %s#%d", a.Identity, a.Link)
	case Admit:
		return fmt.Sprintf("admit %s (%d)", a.Peer, a.Gen)
	case Dismiss:
		return fmt.Sprintf("dismiss %s (%d) agent %q", a.Peer, a.Gen, a.Agent.Name)
	case Grant:
		return fmt.Sprintf("grant job %d to %s: slots %v", a.Job, a.Agent, a.Slots)
	case Revoke:
		return fmt.Sprintf("revoke job %d", a.Job)
	case Post:
		return fmt.Sprintf("post %d by %s: slots %v -> blocks %v, grant %d", a.Transfer, a.Agent.Name, a.Local, a.Remote, a.Grant[0])
	case Cancel:
		return fmt.Sprintf("cancel %d", a.Transfer)
	case Answer:
		return fmt.Sprintf("%s: %s is %v", a.Req, a.Key, map[bool]string{true: "there", false: "not there"}[a.Hit])
	case Fail:
		return fmt.Sprintf("%s: fails: %s", a.Req, a.Why)
	case LoadEnded:
		return fmt.Sprintf("load %d ended ok=%v stopped=%v", a.Job, a.OK, a.Stopped) + sumsText(a.Sums)
	case LoadStopped:
		return fmt.Sprintf("load %d stopped", a.Job)
	case StoreEnded:
		return fmt.Sprintf("store %d ended ok=%v", a.Job, a.OK)
	case Forgo:
		return fmt.Sprintf("forgo lookup %d", a.Lookup)
	case Serve:
		if a.Most < len(a.Keys) {
			return fmt.Sprintf("serve lookup %d: %v, at most %d", a.Lookup, a.Keys, a.Most)
		}
		return fmt.Sprintf("serve lookup %d: %v", a.Lookup, a.Keys)
	case Unpin:
		return fmt.Sprintf("unpin %v", a.Pins)
	case StoreUp:
		return fmt.Sprintf("store up=%v", a.Up)
	case Offered:
		return fmt.Sprintf("%s (%d) offers %v", a.Peer, a.Gen, a.Keys)
	case OffersEnded:
		return fmt.Sprintf("%s (%d) offers nothing more", a.Peer, a.Gen)
	case Note:
		return fmt.Sprintf("note %s %s: %s", a.Peer, a.What, a.Text)
	}
	return fmt.Sprintf("unknown action %T", a)
}
