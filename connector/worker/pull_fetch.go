package worker

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/connector/internal/deadline"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// fetchState is where a read of D stands.
type fetchState uint8

const (
	fetchConnecting fetchState = iota // the handshake with P runs
	fetchClaiming                     // P is asked for the permission
	fetchQueued                       // the agent had no room
	fetchPosting                      // handed to the agent, not yet answered
	fetchReading                      // bytes may move until Stopped
)

// fetch is one request of D whose KV is read from P. It ends exactly once, by endFetch, and never
// while bytes of it may move.
//
//	connecting ──> claiming ──> (queued) ──> reading ──Stopped──> reported
type fetch struct {
	serial uint64
	want   connector.Read
	state  fetchState

	remote   *remote       // from the handshake on
	number   kv.Generation // of the claim; 0 before it was sent, and with a stock P
	token    wire.Token    // of the same: P's answers bring it along
	seq      uint64        // of its message
	tries    int
	sentAt   time.Time
	grant    agent.GrantID
	plan     geometry.Plan
	transfer agent.TransferID
	result   *agent.Result
	recalled wire.Ack         // to P's message that asks for our word that we do not read; Seq 0: none
	told     bool             // P has nothing to do for it any more
	late     bool             // D gives its blocks back too soon to begin
	reported bool             // an event has said why it fails
	failed   *connector.Error // why it is given up; it ends when its transfer has stopped

	due deadline.Item[any]
}

// fetcher is D's part of a machine in pull.
type fetcher struct {
	fetches   map[uint64]*fetch
	byID      map[kv.RequestID]*fetch // the ledger's id
	byNumber  map[kv.Generation]*fetch
	transfers map[agent.TransferID]*fetch // posted, not stopped
	number    kv.Generation               // of the last claim
	busy      line                        // fetches that the agent had no room for
}

// readBusyTimer is the one item for READs that the agent had no room for.
type readBusyTimer struct{}

func (f *fetcher) init() {
	f.fetches = make(map[uint64]*fetch)
	f.byID = make(map[kv.RequestID]*fetch)
	f.byNumber = make(map[kv.Generation]*fetch)
	f.transfers = make(map[agent.TransferID]*fetch)
	f.busy.init(&readBusyTimer{})
}

// inOrder is the reads, oldest first.
func (f *fetcher) inOrder() []*fetch {
	return slices.SortedFunc(maps.Values(f.fetches), func(a, b *fetch) int { return cmp.Compare(a.serial, b.serial) })
}

// startFetch asks for P. Requests that wait for one handshake go on together when it ends.
func (m *machine) startFetch(now time.Time, r connector.Read) {
	if m.fetcher.byID[r.ID] != nil {
		m.ignore("", "read of our ledger", fmt.Sprintf("request %s is being read already", r.ID))
		return
	}
	f := &fetch{serial: m.nextSerial(), want: r}
	f.due.Value = f
	m.fetcher.fetches[f.serial] = f
	m.fetcher.byID[r.ID] = f
	if len(m.fetcher.fetches) > maxReceives {
		m.failFetch(f, connector.PhaseLimit, fmt.Sprintf("this rank receives %d requests already", maxReceives))
		return
	}
	m.timers.Set(&f.due, now.Add(m.timeout()+backstop))
	m.need(r.Peer, waiter{fetch: f.serial})
}

// fetchConnected plans the READ and claims P's blocks. The plan is checked before P is asked: blocks
// that P cannot have (H7) and lists that do not fit (H22) end here.
func (m *machine) fetchConnected(serial uint64, p *remote) {
	f := m.fetcher.fetches[serial]
	if f == nil {
		return
	}
	if p.err != nil {
		m.failFetch(f, connector.PhaseHandshake, p.err.Error())
		return
	}
	f.remote = p
	m.do(pin{p})
	var err error
	if f.plan, err = m.planRead(f.want, p); err != nil {
		m.failFetch(f, connector.PhaseParams, err.Error())
		return
	}
	f.sentAt = m.now
	switch {
	case f.plan.Blocks == 0:
		m.completeFetch(f)
	case m.tooLate(f):
		m.declineFetch(f)
	case p.stock:
		m.postRead(f)
	case !p.claims:
		m.failFetch(f, connector.PhaseHandshake, fmt.Sprintf("engine %q does not lend its blocks; it is an older kvferry: bring both to one version", p.engine))
	default:
		m.fetcher.number++
		f.number, f.token = m.fetcher.number, m.tokens.next()
		m.fetcher.byNumber[f.number] = f
		f.seq = m.letters.next(m.correspondent(p.name()))
		f.state = fetchClaiming
		m.emit(event.ClaimSent{Request: f.want.ID, Remote: f.want.Remote, Peer: p.engine, Blocks: f.plan.Blocks})
		m.sendClaim(f)
	}
}

func (m *machine) planRead(r connector.Read, p *remote) (geometry.Plan, error) {
	if len(r.Blocks) != 1 || len(r.RemoteBlocks) != 1 {
		return geometry.Plan{}, fmt.Errorf("blocks of %d KV-cache groups are wanted, of %d the prefill engine has some; one is supported", len(r.Blocks), len(r.RemoteBlocks))
	}
	return geometry.PlanRead(m.cfg.Layout, p.layout,
		geometry.Want{Blocks: r.Blocks[0], Positioned: true, StartToken: r.StartToken, NumTokens: r.NumTokens - r.StartToken},
		geometry.Have{Blocks: r.RemoteBlocks[0], NumTokens: r.NumTokens})
}

func (m *machine) fetchUnconnected(serial uint64, err error) {
	if f := m.fetcher.fetches[serial]; f != nil {
		f.reported = true // by the handshake
		m.failFetch(f, connector.PhaseHandshake, err.Error())
	}
}

// sendClaim asks P for the permission, or asks again: P takes a number once and answers every copy.
func (m *machine) sendClaim(f *fetch) {
	w := f.want
	f.tries++
	m.timers.Set(&f.due, m.now.Add(m.interval()))
	m.control(f.remote, "claim", &wire.Claim{Seq: f.seq, From: m.us(), RegistrationRef: refOf(w.Remote, f.number, f.token), Lease: w.Lease,
		Tokens: w.NumTokens, Readers: w.Readers, Digest: w.Digest, Blocks: wire.BlocksDigest(w.RemoteBlocks)})
	m.stats.ClaimsSent++
}

// fetchDue looks after a read whose time has come.
func (m *machine) fetchDue(f *fetch) {
	switch {
	case f.state == fetchConnecting:
		m.failFetch(f, connector.PhaseWait, fmt.Sprintf("its %s engine was not reached within %v", f.lender(), m.timeout()+backstop))
	case f.state == fetchClaiming && f.tries >= maxClaimTries:
		m.stats.PeersSilent++
		m.failFetch(f, connector.PhaseWait, fmt.Sprintf(
			"engine %q did not answer %d times within %v: check that it runs, is not stopped, and can reach %s",
			f.want.Peer.Engine, f.tries, time.Duration(f.tries)*m.interval(), m.whereWeAre()))
	case f.state == fetchClaiming:
		m.sendClaim(f)
	default: // the agent bounds the silence of a transfer; the ledger is told that it goes on
		m.timers.Set(&f.due, m.now.Add(m.timeout()/4))
		m.do(reportProgress{f.want.ID})
	}
}

// onClaimed has P's permission.
func (m *machine) onClaimed(from agent.Name, c *wire.Claimed) {
	f := m.fetcher.byNumber[c.Generation]
	if f == nil || f.remote.name() != from || c.ID != f.want.Remote || f.state != fetchClaiming {
		m.ignore(from, "permission", fmt.Sprintf("request %s is not claimed from this agent", c.ID))
		return
	}
	if !same(f.token, c.Token) {
		m.forged(from, "permission", c.ID)
		return
	}
	f.grant = c.Grant
	m.do(reportProgress{f.want.ID})
	m.postRead(f)
}

// onClaimFailed ends what P refuses or has taken back. A transfer under way ends first, and then P has
// our word that nothing is read any more.
func (m *machine) onClaimFailed(from agent.Name, w *wire.Failed) {
	f := m.fetcher.byNumber[w.Generation]
	if f == nil || f.remote.name() != from || w.ID != f.want.Remote {
		if r := m.named[from]; r != nil && r.control {
			m.control(r, "acknowledgement", &wire.Ack{Seq: w.Seq, Receipt: w.Receipt})
			if f == nil {
				return // it crossed our own word
			}
		}
		m.ignore(from, "failure", fmt.Sprintf("request %s is not read from this agent", w.ID))
		return
	}
	if !same(f.token, w.Token) {
		m.forged(from, "refusal", w.ID)
		return
	}
	f.recalled = wire.Ack{Seq: w.Seq, Receipt: w.Receipt}
	f.told = true
	phase := failedPhase(w.Phase)
	if w.Phase == string(connector.PhaseParams) {
		phase = connector.PhaseParams
	}
	m.failFetch(f, phase, "the "+f.lender()+" engine does not let us read it: "+w.Reason)
}

// postRead hands a READ to the agent, behind those to the same peer that wait for room.
func (m *machine) postRead(f *fetch) {
	m.timers.Set(&f.due, m.now.Add(m.timeout()/4))
	if l := &m.fetcher.busy; l.waits(f.remote.name()) {
		f.state = fetchQueued
		l.enter(f.remote.name(), f.serial)
		return
	}
	m.handRead(f)
}

func (m *machine) handRead(f *fetch) {
	if m.tooLate(f) {
		f.state = fetchQueued // nothing moves
		m.declineFetch(f)
		m.fetcher.busy.answered(f.serial, f.remote.name(), false)
		m.nextRead()
		return
	}
	f.state = fetchPosting
	m.do(read{f.serial, f.remote, f.plan, f.grant, m.readNotif(f)})
}

// readNotif is the notification that comes with the end of a READ: of its claim, or a stock P's.
func (m *machine) readNotif(f *fetch) []byte {
	if f.number == 0 {
		return m.readDone(f.want.Remote, f.want.Readers)
	}
	msg, err := wire.AppendControl(nil, &wire.ReadDone{RegistrationRef: refOf(f.want.Remote, f.number, f.token)})
	if err != nil { // the claim could be written
		return nil
	}
	return msg
}

// readDone is the notification that a stock P counts, and of a request that needs no READ (nixl-connector.md, section 5.2): as many are to come as D
// has requests that take this KV, so that the first of several answers to one prompt does not end
// P's hold under the others (H9).
func (m *machine) readDone(remote kv.RequestID, readers int) []byte {
	msg, err := wire.AppendCompletion(nil, wire.Completion{ID: remote, N: max(readers, 1)})
	if err != nil {
		return nil
	}
	return msg
}

// onReadPosted learns whether the agent took a READ. Whatever becomes of it, the next in line has its
// turn.
func (m *machine) onReadPosted(in readPosted) {
	l := &m.fetcher.busy
	f := m.fetcher.fetches[in.fetch]
	if f == nil || f.state != fetchPosting {
		l.answered(in.fetch, "", true)
		m.nextRead()
		return
	}
	name, busy := f.remote.name(), errors.Is(in.err, agent.ErrBusy)
	tried := l.answered(in.fetch, name, busy)
	switch {
	case busy && f.failed == nil && !m.closing:
		f.state = fetchQueued
		l.keep(name, f.serial, tried)
	case in.err != nil:
		f.state, f.reported = fetchQueued, f.failed == nil // nothing moves
		m.emit(event.TransferFailed{Request: f.want.ID, Op: event.Read, Peer: f.remote.engine, Rank: m.cfg.Rank, Phase: "post", Err: in.err})
		m.stats.TransfersFailed++
		m.failFetch(f, connector.PhaseTransfer, in.err.Error())
	default:
		f.state, f.transfer = fetchReading, in.transfer
		m.fetcher.transfers[in.transfer] = f
		l.posted(name)
		m.emit(event.TransferPosted{Request: f.want.ID, Op: event.Read, Peer: f.remote.engine, Rank: m.cfg.Rank, Descs: len(f.plan.Local), Bytes: f.plan.Bytes})
		m.stats.TransfersPosted++
		if f.failed != nil || m.closing {
			m.do(cancel{in.transfer})
		}
	}
	m.nextRead()
}

// retryReads lets every peer's queue have a turn: there may be room.
func (m *machine) retryReads() {
	m.fetcher.busy.round()
	m.nextRead()
}

// nextRead hands the READ whose turn it is to the agent; its answer goes on.
func (m *machine) nextRead() {
	l := &m.fetcher.busy
	if serial, ok := l.next(); ok && !m.closing {
		m.handRead(m.fetcher.fetches[serial])
		return
	}
	m.watchLine(l)
}

// readResult keeps how a READ ended. It tells whether the transfer was one.
func (m *machine) readResult(res agent.Result) bool {
	f := m.fetcher.transfers[res.Transfer]
	if f == nil {
		return false
	}
	if f.result != nil {
		return true
	}
	f.result = &res
	if res.Outcome == agent.OutcomeDone {
		m.emit(event.TransferDone{Request: f.want.ID, Op: event.Read, Peer: f.remote.engine, Rank: m.cfg.Rank, Descs: res.Descs,
			Bytes: res.Bytes, Post: res.Post, Took: res.Took})
		m.stats.TransfersDone++
		return true
	}
	f.reported = f.failed == nil // else it was cancelled for another reason
	m.emit(event.TransferFailed{Request: f.want.ID, Op: event.Read, Peer: f.remote.engine, Rank: m.cfg.Rank, Phase: "transfer", GivenUp: f.failed != nil || m.closing, Err: resultError(res)})
	m.stats.TransfersFailed++
	return true
}

// readStopped ends a read: no byte of it moves any more. One that is done counts, whatever else was
// said of it since: its agent has seen that P's permission held to the end.
func (m *machine) readStopped(s agent.Stopped) bool {
	f := m.fetcher.transfers[s.Transfer]
	if f == nil {
		return false
	}
	delete(m.fetcher.transfers, s.Transfer)
	m.fetcher.busy.stopped(f.remote.name())
	m.emit(event.TransferStopped{Request: f.want.ID, Op: event.Read, Peer: f.remote.engine, Rank: m.cfg.Rank})
	f.state = fetchQueued // nothing moves
	switch {
	case f.result == nil:
		m.failFetch(f, connector.PhaseTransfer, "the agent gave no result")
	case f.result.Outcome == agent.OutcomeDone && f.result.Bytes < f.plan.Bytes:
		f.told = true // by the notification
		m.failFetch(f, connector.PhaseTransfer, fmt.Sprintf("%d of %d bytes were read", f.result.Bytes, f.plan.Bytes))
	case f.result.Outcome == agent.OutcomeDone && m.mayBeStale(f):
		f.told = true
		m.failFetch(f, connector.PhaseLease, "the decode engine may have used the blocks again before they were read")
	case f.result.Outcome == agent.OutcomeDone:
		m.completeFetch(f)
	case f.failed != nil:
		m.failFetch(f, f.failed.Phase, f.failed.Reason)
	default:
		m.failFetch(f, connector.PhaseTransfer, resultError(*f.result).Error())
	}
	m.retryReads()
	return true
}

// completeFetch ends a read well. Of one that had nothing to move P is told by a notification alone.
func (m *machine) completeFetch(f *fetch) {
	facts := connector.TransferFacts{
		Blocks:    f.plan.Blocks,
		Bytes:     f.plan.Bytes,
		Waited:    m.now.Sub(f.sentAt),
		Transport: f.remote.agent.Transport,
		Why:       f.remote.agent.Why,
	}
	if f.result != nil {
		facts.Took = f.result.Took
	} else {
		m.release(f.remote, f.want.Remote, f.want.Readers)
	}
	p := f.remote.engine
	m.forgetFetch(f)
	m.emit(event.ReceiveFinished{Request: f.want.ID, Peer: p, Blocks: facts.Blocks, Bytes: facts.Bytes,
		Took: facts.Took, Waited: facts.Waited, Transport: facts.Transport, Why: facts.Why})
	m.do(reportReceived{connector.ReceiveReport{ID: f.want.ID, Transfer: facts}})
	m.stats.Received++
}

// release tells P that one request of ours does not need its blocks, by the notification alone, as
// stock engines do.
func (m *machine) release(p *remote, id kv.RequestID, readers int) {
	if msg := m.readDone(id, readers); msg != nil {
		m.do(notify{p.engine, p.agent.ID, "completion", msg})
	}
}

// releaseAt does the same to an engine that may not be connected.
func (m *machine) releaseAt(addr connector.PeerAddr, id kv.RequestID, readers int) {
	m.whenConnected(addr, "", func(p *remote) { m.release(p, id, readers) })
}

// cancelFetch ends a read that D does not want any more. One that has ended was reported.
func (m *machine) cancelFetch(id kv.RequestID) {
	if f := m.fetcher.byID[id]; f != nil && f.failed == nil {
		m.failFetch(f, connector.PhaseCancel, "it was cancelled while it was read")
	}
}

// failFetch gives a read up: at once if nothing of it moves, else when its transfer has stopped. P is
// told, if it may still keep the blocks for it; but not by a request whose parameters do not fit, which
// may have named another's blocks: P has its lease. The first reason stays.
func (m *machine) failFetch(f *fetch, phase connector.Phase, reason string) {
	err := &connector.Error{Request: f.want.ID, Peer: f.want.Peer.Engine, Phase: phase, Reason: reason}
	if f.state == fetchPosting || f.state == fetchReading {
		if f.failed == nil {
			f.failed = err
			if f.state == fetchReading {
				m.do(cancel{f.transfer})
			}
		}
		return
	}
	if f.failed != nil {
		err = f.failed
	}
	switch {
	case m.closing:
	case f.remote == nil && phase == connector.PhaseCancel:
		m.releaseAt(f.want.Peer, f.want.Remote, f.want.Readers)
	case f.remote == nil || m.named[f.remote.name()] != f.remote: // not reached, or gone
	case f.told:
	case f.number != 0:
		m.send(f.remote, "cancel", 0, func(seq uint64, receipt wire.Token) wire.Notification {
			return &wire.Cancel{Seq: seq, Receipt: receipt, From: m.us(), RegistrationRef: refOf(f.want.Remote, f.number, f.token), Reason: wire.BoundReason(err.Reason)}
		})
		m.cancelSent(f.want.ID, f.remote.engine, err.Reason)
	case f.remote.stock && f.result != nil && f.result.Outcome != agent.OutcomeDone: // it was no claim, but P may wait
		m.release(f.remote, f.want.Remote, f.want.Readers)
	}
	m.forgetFetch(f)
	m.reportFailedRead(f, err)
}

func (m *machine) reportFailedRead(f *fetch, err *connector.Error) {
	m.emit(event.ReceiveFailed{Request: f.want.ID, Peer: f.want.Peer.Engine, Phase: string(err.Phase), Expired: f.late, Told: f.reported, Err: err})
	m.do(reportReceived{connector.ReceiveReport{ID: f.want.ID, Err: err}})
	m.stats.ReceivesFailed++
}

// forgetFetch drops a read of which nothing moves.
func (m *machine) forgetFetch(f *fetch) {
	if f.recalled.Seq != 0 && m.named[f.remote.name()] == f.remote && !m.closing {
		m.control(f.remote, "acknowledgement", &f.recalled)
	}
	if f.remote != nil {
		m.do(unpin{f.remote})
	}
	m.timers.Remove(&f.due)
	m.leaveLine(&m.fetcher.busy, f.serial)
	delete(m.fetcher.fetches, f.serial)
	delete(m.fetcher.byID, f.want.ID)
	delete(m.fetcher.byNumber, f.number)
}

// fetchesLost ends what waits for an agent that is gone. Transfers end by their Results.
func (m *machine) fetchesLost(name agent.Name, err error) {
	for _, f := range m.fetcher.inOrder() {
		if f.remote != nil && f.remote.name() == name && (f.state == fetchClaiming || f.state == fetchQueued) {
			f.told = true
			m.failFetch(f, connector.PhaseTransfer, fmt.Sprintf("the %s engine's agent is gone: %v", f.lender(), err))
		}
	}
}

// shutdownFetcher ends every read; transfers under way end by their Stopped.
func (m *machine) shutdownFetcher() {
	m.timers.Remove(&m.fetcher.busy.timer)
	m.fetcher.busy.clear()
	for _, f := range m.fetcher.inOrder() {
		m.failFetch(f, connector.PhaseCancel, "this engine is shutting down")
	}
}
