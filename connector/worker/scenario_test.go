package worker

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
	"github.com/kvferry/kvferry/wire"
)

// The scenarios drive one machine and print everything that it wants done, and when it wants to be
// called again. Times are seconds since the start.
//
//	at t=5                                 let time pass
//	meta register=d1 blocks=1,2 start=0 tokens=8 transfer=x digest=1 peer=Q
//	meta finish=p1 blocks=4,5 tokens=8 transfer=x digest=1 lease=30
//	meta queue=p1 transfer=x digest=1 | withdraw=d1 transfer=x remote=R peer=Q
//	meta release=p1 generation=5
//	meta process=p1 | drop=p1 transfer=x | cancel=d1 | beat=d1,x peer=Q | beat=none
//	connected Q gen=1 [stock] [size=8] [agent=q.0] [offset=100]   connect-failed Q
//	granted receive=1 [err]     register-failed receive=1
//	posted push=1 transfer=1 | busy | err            result transfer=1 outcome=done [bytes=64]   stopped transfer=1
//	notify from=q.0 registration=d1 blocks=7,8 start=0 tokens=8 transfer=x digest=1 gen=1 [stock] [tp=2] [engine=Q]
//	notify from=q.0 completion=d1 n=1 [bytes=128]    notify from=q.0 fail=d1   notify from=q.0 beat=p1,x
//	notify from=q.0 alive=(x,y) refs=(d1:1) seq=4          a beat, with registrations and their generations
//	notify from=q.0 state=running id=d1 gen=1 seq=4        notify from=q.0 cancel=d1 gen=1 seq=5 [transfer=x] [remote=R]
//	notify from=q.0 failed=d1 gen=1 phase=lease seq=5      notify from=q.0 ack=5
//	in files named pull…: meta read=d1 blocks=1,2 from=7,8 start=0 tokens=8 remote=p1 [lease=5] [readers=2] [earlier] [expiry=480]
//	meta finish=d1 … prefixes=2            D keeps it for the next turn; digests 100, 101
//	lent claim=1 [err]          read-posted fetch=1 transfer=1 | busy | err
//	notify from=q.0 claim=p1 gen=1 seq=4 blocks=7,8 tokens=8 digest=1 [lease=5] [readers=2]
//	notify from=q.0 claimed=p1 gen=1 grant=9 seq=4         notify from=q.0 taken=p1 gen=1
//	forged, at the end of a control message: a stranger sends it, who guesses its tokens
//	notify from=q.0 raw=text    lost agent=q.0 [inbound]    shutdown
func TestScenarios(t *testing.T) {
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		cfg := machineConfig()
		if strings.Contains(path, "pull") {
			cfg.Mode = kv.Pull
		}
		s := &scenario{start: time.Unix(1000, 0)}
		cfg.Clock = func(at time.Time) float64 { return at.Sub(s.start).Seconds() }
		s.m = newMachine(cfg)
		s.now = s.start
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			in := s.input(t, d)
			var b strings.Builder
			for _, a := range s.m.Step(s.now, in) {
				fmt.Fprintln(&b, show(a))
			}
			if at, ok := s.m.Deadline(); ok {
				fmt.Fprintf(&b, "next at %v\n", at.Sub(s.start))
			}
			return b.String()
		})
	})
}

type scenario struct {
	m          *machine
	start, now time.Time
}

func arg(d *datadriven.TestData, key string) (string, bool) {
	for _, a := range d.CmdArgs {
		if a.Key == key {
			return strings.Join(a.Vals, ","), true
		}
	}
	return "", false
}

func argInt(t *testing.T, d *datadriven.TestData, key string, def int) int {
	s, ok := arg(d, key)
	if !ok {
		return def
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		d.Fatalf(t, "%s: %v", key, err)
	}
	return n
}

func argBlocks(t *testing.T, d *datadriven.TestData) kv.BlockIDs {
	s, _ := arg(d, "blocks")
	return kv.BlockIDs{blockList(t, d, s)}
}

func blockList(t *testing.T, d *datadriven.TestData, s string) []kv.BlockID {
	var out []kv.BlockID
	for f := range strings.SplitSeq(strings.Trim(s, "()"), ",") {
		if f = strings.TrimSpace(f); f == "" {
			continue
		}
		n, err := strconv.Atoi(f)
		if err != nil {
			d.Fatalf(t, "blocks: %v", err)
		}
		out = append(out, kv.BlockID(n))
	}
	return out
}

func argIDs(s string) []kv.RequestID {
	var out []kv.RequestID
	for f := range strings.SplitSeq(strings.Trim(s, "()"), ",") {
		out = append(out, kv.RequestID(strings.TrimSpace(f)))
	}
	return out
}

func addrOf(engine string) connector.PeerAddr {
	return connector.PeerAddr{Engine: kv.EngineID(engine), Host: strings.ToLower(engine), Port: 5600, TP: 1, PP: 1}
}

func (s *scenario) input(t *testing.T, d *datadriven.TestData) input {
	transfer, _ := arg(d, "transfer")
	digest := connector.Digest{byte(argInt(t, d, "digest", 0))}
	engine := "Q"
	if p, ok := arg(d, "peer"); ok {
		engine = p
	}
	_, failed := arg(d, "err")
	switch d.Cmd {
	case "at":
		s.now = s.start.Add(time.Duration(argInt(t, d, "t", 0)) * time.Second)
		return tick{}
	case "meta":
		var m connector.StepMeta
		if id, ok := arg(d, "register"); ok {
			m.Registrations = []connector.Registration{{ID: kv.RequestID(id), TransferID: kv.TransferID(transfer), Blocks: argBlocks(t, d),
				StartToken: argInt(t, d, "start", 0), NumTokens: argInt(t, d, "tokens", 0), Digest: digest, Peer: addrOf(engine),
				Lease: kv.Generation(argInt(t, d, "lease", 0))}}
		}
		if id, ok := arg(d, "finish"); ok {
			m.Finished = []connector.FinishedBlocks{{ID: kv.RequestID(id), TransferID: kv.TransferID(transfer), Blocks: argBlocks(t, d),
				NumTokens: argInt(t, d, "tokens", 0), Lease: time.Duration(argInt(t, d, "lease", 30)) * time.Second, Digest: digest,
				Generation: kv.Generation(argInt(t, d, "generation", 0))}}
		}
		if id, ok := arg(d, "release"); ok {
			m.Released = []connector.Release{{ID: kv.RequestID(id), Lease: kv.Generation(argInt(t, d, "generation", 0))}}
		}
		if id, ok := arg(d, "queue"); ok {
			m.Queued = []connector.QueuedRequest{{ID: kv.RequestID(id), TransferID: kv.TransferID(transfer), Digest: digest}}
		}
		if id, ok := arg(d, "withdraw"); ok {
			remote, _ := arg(d, "remote")
			m.Withdrawn = []connector.Withdrawal{{ID: kv.RequestID(id), TransferID: kv.TransferID(transfer), Remote: kv.RequestID(remote),
				Digest: digest, Peer: addrOf(engine), Reason: "aborted"}}
		}
		if id, ok := arg(d, "process"); ok {
			m.Processing = argIDs(id)
		}
		if id, ok := arg(d, "drop"); ok {
			m.Dropped = []connector.DroppedRequest{{ID: kv.RequestID(id), TransferID: kv.TransferID(transfer), Reason: "the prefill ended as \"abort\""}}
		}
		if id, ok := arg(d, "cancel"); ok {
			m.Cancels = argIDs(id)
		}
		if ids, ok := arg(d, "beat"); ok {
			m.HasHeartbeats = true
			if ids != "none" {
				m.Heartbeats = []connector.HeartbeatGroup{{Peer: addrOf(engine), IDs: argIDs(ids)}}
			}
		}
		s.readMeta(t, d, &m, addrOf(engine), digest)
		return stepMeta{m}
	case "connected":
		return connected{addrOf(d.CmdArgs[0].Key), s.connected(t, d)}
	case "connect-failed":
		return connectFailed{addrOf(d.CmdArgs[0].Key), errors.New("no answer")}
	case "granted":
		in := granted{receive: uint64(argInt(t, d, "receive", 0)), grant: agent.GrantID{byte(argInt(t, d, "receive", 0))}}
		if failed {
			in.grant, in.err = agent.GrantID{}, errors.New("too many grants")
		}
		return in
	case "register-failed":
		return registrationFailed{uint64(argInt(t, d, "receive", 0)), errors.New("the peer is gone")}
	case "posted":
		in := posted{push: uint64(argInt(t, d, "push", 0)), transfer: agent.TransferID(argInt(t, d, "transfer", 0))}
		if _, busy := arg(d, "busy"); busy {
			in.err = agent.ErrBusy
		} else if failed {
			in.err = errors.New("refused")
		}
		return in
	case "result":
		name, _ := arg(d, "outcome")
		r := agent.Result{Transfer: agent.TransferID(argInt(t, d, "transfer", 0)), Bytes: int64(argInt(t, d, "bytes", 128)), Descs: 2}
		for r.Outcome.String() != name && r.Outcome < 6 {
			r.Outcome++
		}
		return transferResult{r}
	case "stopped":
		return transferStopped{agent.Stopped{Transfer: agent.TransferID(argInt(t, d, "transfer", 0))}}
	case "notify":
		return s.notification(t, d)
	case "lost":
		name, _ := arg(d, "agent")
		_, inbound := arg(d, "inbound")
		return peerLost{agent.PeerLost{Peer: agent.PeerID{Name: agent.Name(name), Gen: 1}, Inbound: inbound, Err: errors.New("connection reset")}}
	case "shutdown":
		return shutdown{}
	case "lent":
		in := lent{claim: uint64(argInt(t, d, "claim", 0)), grant: agent.GrantID{byte(argInt(t, d, "claim", 0))}}
		if failed {
			in.grant, in.err = agent.GrantID{}, errors.New("too many grants")
		}
		return in
	case "read-posted":
		in := readPosted{fetch: uint64(argInt(t, d, "fetch", 0)), transfer: agent.TransferID(argInt(t, d, "transfer", 0))}
		if _, busy := arg(d, "busy"); busy {
			in.err = agent.ErrBusy
		} else if failed {
			in.err = errors.New("refused")
		}
		return in
	}
	d.Fatalf(t, "unknown command %q", d.Cmd)
	return nil
}

func (s *scenario) connected(t *testing.T, d *datadriven.TestData) *peer.Connected {
	c := s.peerOf(d.CmdArgs[0].Key)
	r := &c.Ranks[0]
	if name, ok := arg(d, "agent"); ok {
		r.Agent.ID.Name = agent.Name(name)
	}
	r.Meta.BlockSize = argInt(t, d, "size", 4)
	if _, stock := arg(d, "stock"); stock {
		r.Meta.Extension = nil
	}
	if _, old := arg(d, "nocontrol"); old {
		r.Meta.Extension.Capabilities = []string{PushFailCapability}
	}
	c.Clock.Offset, c.Clock.RTT = float64(argInt(t, d, "offset", 0)), time.Duration(argInt(t, d, "rtt", 0))*time.Second
	c.Gen = kv.Generation(argInt(t, d, "gen", 1))
	r.Agent.ID.Gen = c.Gen
	return c
}

// peerOf is a connected engine of one rank whose memory is like ours.
func (s *scenario) peerOf(engine string) *peer.Connected {
	meta := &wire.AgentMetadata{EngineID: kv.EngineID(engine), KVCachesBaseAddr: []uint64{1 << 20}, NumBlocks: 100, BlockLens: []int{64},
		BlockStrides: []int{64}, KVCacheLayout: "LBHNC", BlockSize: 4, PhysicalBlocksPerLogical: 1, DCPSize: 1, PCPSize: 1,
		Extension: &wire.Extension{Version: 1, Instance: "i", Capabilities: Capabilities()}}
	return &peer.Connected{Engine: kv.EngineID(engine), Gen: 1, Ranks: []peer.RankPeer{{
		Agent: agent.Peer{ID: agent.PeerID{Name: agent.Name(strings.ToLower(engine) + ".0"), Gen: 1}, Transport: "local", Why: "test"}, Meta: meta}}}
}

func (s *scenario) notification(t *testing.T, d *datadriven.TestData) input {
	from, _ := arg(d, "from")
	n := agent.Notification{From: agent.PeerID{Name: agent.Name(from), Gen: 1}}
	transfer, _ := arg(d, "transfer")
	engine, ok := arg(d, "engine")
	if !ok {
		engine = "Q"
	}
	var err error
	if id, ok := arg(d, "registration"); ok {
		p := &wire.PushReg{RequestID: kv.RequestID(id), DecodeEngineID: kv.EngineID(engine), DecodeHost: strings.ToLower(engine), DecodePort: 5600,
			DecodeTPSize: argInt(t, d, "tp", 1), LocalBlockIDs: argBlocks(t, d), TransferID: kv.TransferID(transfer)}
		if _, stock := arg(d, "stock"); !stock {
			start := argInt(t, d, "start", 0)
			p.Extension = &wire.PushRegExtension{Grant: [16]byte{9}, StartToken: start, NumTokens: argInt(t, d, "tokens", 0) - start,
				PromptDigest: connector.Digest{byte(argInt(t, d, "digest", 0))}, Generation: kv.Generation(argInt(t, d, "gen", 1)), Token: theirRef(d, id, kv.Generation(argInt(t, d, "gen", 1))).Token,
				Lease: kv.Generation(argInt(t, d, "lease", 0))}
		}
		n.Msg, err = wire.AppendPushReg(nil, p)
	} else if id, ok := arg(d, "completion"); ok {
		n.Msg, err = wire.AppendCompletion(nil, wire.Completion{ID: kv.RequestID(id), N: argInt(t, d, "n", 1)})
		if bytes := argInt(t, d, "bytes", -1); bytes >= 0 {
			n.Arrival = &agent.Arrival{Bytes: int64(bytes), Took: time.Millisecond}
		}
	} else if id, ok := arg(d, "fail"); ok {
		n.Msg, err = wire.AppendPushFail(nil, wire.PushFail{ID: kv.RequestID(id), TP: 1})
	} else if ids, ok := arg(d, "beat"); ok {
		n.Msg, err = wire.AppendHeartbeat(nil, argIDs(ids))
	} else if c := s.controlMessage(t, d, engine); c != nil {
		n.Msg, err = wire.AppendControl(nil, c)
	} else if raw, ok := arg(d, "raw"); ok {
		n.Msg = []byte(raw)
	}
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	return notification{n}
}

func (s *scenario) controlMessage(t *testing.T, d *datadriven.TestData, engine string) wire.Notification {
	seq, gen := uint64(argInt(t, d, "seq", 0)), kv.Generation(argInt(t, d, "gen", 0))
	us := wire.Sender{Engine: kv.EngineID(engine), Host: strings.ToLower(engine), Port: 5600, TP: 1}
	if names, ok := arg(d, "alive"); ok {
		b := &wire.Beat{Seq: seq, From: us, Names: argIDs(names)}
		if refs, ok := arg(d, "refs"); ok {
			for _, ref := range argIDs(refs) {
				id, g, _ := strings.Cut(string(ref), ":")
				n, err := strconv.Atoi(g)
				if err != nil {
					d.Fatalf(t, "refs: %v", err)
				}
				b.Registrations = append(b.Registrations, theirRef(d, id, kv.Generation(n)))
			}
		}
		return b
	}
	if state, ok := arg(d, "state"); ok {
		id, _ := arg(d, "id")
		return &wire.States{Seq: seq, Answers: []wire.StateAnswer{{RegistrationRef: s.refArg(d, id, gen), State: wire.RequestState(state)}}}
	}
	if id, ok := arg(d, "cancel"); ok {
		transfer, _ := arg(d, "transfer")
		remote, _ := arg(d, "remote")
		return &wire.Cancel{Seq: seq, Receipt: tokenOf(kv.Generation(seq)), From: us, RegistrationRef: theirRef(d, id, gen), TransferID: kv.TransferID(transfer),
			RemoteID: kv.RequestID(remote), Digest: connector.Digest{byte(argInt(t, d, "digest", 0))}, Reason: "aborted"}
	}
	if id, ok := arg(d, "failed"); ok {
		phase, _ := arg(d, "phase")
		return &wire.Failed{Seq: seq, Receipt: tokenOf(kv.Generation(seq)), RegistrationRef: s.refArg(d, id, gen), Phase: phase, Reason: "so it is"}
	}
	if c := s.claimMessage(t, d, us); c != nil {
		return c
	}
	if _, ok := arg(d, "ack"); ok {
		from, _ := arg(d, "from")
		a := s.m.ackOf(agent.Name(from), uint64(argInt(t, d, "ack", 0)))
		if _, forged := arg(d, "forged"); forged {
			a.Receipt[0]++
		}
		return a
	}
	return nil
}

// refArg is what P names: a registration or claim of ours.
func (s *scenario) refArg(d *datadriven.TestData, id string, gen kv.Generation) wire.RegistrationRef {
	return forge(d, s.m.ourRef(kv.RequestID(id), gen))
}

// theirRef is what D names: its own registration.
func theirRef(d *datadriven.TestData, id string, gen kv.Generation) wire.RegistrationRef {
	return forge(d, testRef(kv.RequestID(id), gen))
}

func forge(d *datadriven.TestData, ref wire.RegistrationRef) wire.RegistrationRef {
	if _, forged := arg(d, "forged"); forged {
		ref.Token[0]++
	}
	return ref
}

// show prints an action.
func show(a action) string {
	switch a := a.(type) {
	case connect:
		return fmt.Sprintf("connect %s at %s:%d", a.addr.Engine, a.addr.Host, a.addr.Port)
	case pin:
		return fmt.Sprintf("pin %s generation %d", a.remote.engine, a.remote.gen)
	case unpin:
		return fmt.Sprintf("unpin %s generation %d", a.remote.engine, a.remote.gen)
	case grant:
		var at []string
		for _, r := range a.ranges {
			at = append(at, fmt.Sprint((r.Addr-4096)/64))
		}
		return fmt.Sprintf("grant receive=%d to %s: blocks %s", a.receive, a.peer, strings.Join(at, " "))
	case revoke:
		return fmt.Sprintf("revoke %d", a.grant[0])
	case register:
		return fmt.Sprintf("register receive=%d to %s: %s", a.receive, a.peer.Name, showMsg(a.msg))
	case notify:
		return fmt.Sprintf("notify %s: %s", a.peer.Name, showMsg(a.msg))
	case post:
		return fmt.Sprintf("post push=%d to %s: %v -> %v grant %d notif %s", a.push, a.remote.name(), a.plan.Local, a.plan.Remote, a.grant[0], a.notif)
	case lend, read:
		return showPull(a)
	case cancel:
		return fmt.Sprintf("cancel transfer %d", a.transfer)
	case forget:
		return fmt.Sprintf("forget the list of %s", a.peer.Name)
	case lost:
		return fmt.Sprintf("tell the table that %s is lost", a.peer.Name)
	case reportSent:
		if a.Err == nil {
			return fmt.Sprintf("REPORT sent %s", a.ID)
		}
		return fmt.Sprintf("REPORT not sent %s (%s): %s", a.ID, a.Err.Phase, a.Err.Reason)
	case reportReceived:
		if a.Err == nil {
			return fmt.Sprintf("REPORT received %s: %+v", a.ID, a.Transfer)
		}
		return fmt.Sprintf("REPORT not received %s (%s): %s", a.ID, a.Err.Phase, a.Err.Reason)
	case reportProgress:
		return fmt.Sprintf("REPORT progress %s", a.id)
	case emit:
		return "event " + showEvent(a.Event)
	}
	return fmt.Sprintf("%T", a)
}

// showEvent prints an event without its empty fields.
func showEvent(e interface{ Kind() string }) string {
	out := []string{e.Kind()}
	v := reflect.ValueOf(e)
	for i := range v.NumField() {
		if f := v.Field(i); !f.IsZero() {
			out = append(out, fmt.Sprintf("%s=%v", strings.ToLower(v.Type().Field(i).Name), f.Interface()))
		}
	}
	return strings.Join(out, " ")
}

func showMsg(b []byte) string {
	n, err := wire.ParseNotification(b)
	if err != nil {
		return err.Error()
	}
	switch n := n.(type) {
	case *wire.Beat:
		refs := []string{}
		for _, r := range n.Registrations {
			refs = append(refs, fmt.Sprintf("{%s %d}", r.ID, r.Generation))
		}
		return fmt.Sprintf("BEAT %d of %s: %v registrations %v", n.Seq, n.From.Engine, n.Names, refs)
	case *wire.States:
		answers := []string{}
		for _, a := range n.Answers {
			answers = append(answers, fmt.Sprintf("{{%s %d} %s}", a.ID, a.Generation, a.State))
		}
		return fmt.Sprintf("STATES for %d: %v", n.Seq, answers)
	case *wire.Cancel:
		return fmt.Sprintf("CANCEL %d %s generation %d transfer=%q remote=%q: %s", n.Seq, n.ID, n.Generation, n.TransferID, n.RemoteID, n.Reason)
	case *wire.Failed:
		return fmt.Sprintf("FAILED %d %s generation %d (%s): %s", n.Seq, n.ID, n.Generation, n.Phase, n.Reason)
	case *wire.Ack:
		return fmt.Sprintf("ACK %d", n.Seq)
	case *wire.Claim:
		return fmt.Sprintf("CLAIM %d %s number %d of %s: lease %d, %d tokens, prompt %d, readers %d", n.Seq, n.ID, n.Generation, n.From.Engine, n.Lease, n.Tokens, n.Digest[0], n.Readers)
	case *wire.ReadDone:
		return fmt.Sprintf("READ %s number %d", n.ID, n.Generation)
	case *wire.Claimed:
		return fmt.Sprintf("CLAIMED for %d: %s number %d grant %d", n.Seq, n.ID, n.Generation, n.Grant[0])
	}
	p, ok := n.(*wire.PushReg)
	if !ok {
		return string(b)
	}
	s := fmt.Sprintf("PUSH_REG %s transfer=%q of %s at %s:%d blocks %v", p.RequestID, p.TransferID, p.DecodeEngineID, p.DecodeHost, p.DecodePort, p.LocalBlockIDs)
	if x := p.Extension; x != nil {
		s += fmt.Sprintf(" grant %d from token %d, %d tokens, prompt %d, generation %d", x.Grant[0], x.StartToken, x.NumTokens, x.PromptDigest[0], x.Generation)
		if x.Lease != 0 {
			s += fmt.Sprintf(", lease %d", x.Lease)
		}
	}
	return s
}
