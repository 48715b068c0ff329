package peer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/internal/zmtp"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// findings is what an engine's side channel told.
type findings struct {
	ranks []answer // of the target, in its order
	root  answer   // of rank (0,0), which may be one of them
	clock ClockSample
}

// answer is one rank's metadata, checked.
type answer struct {
	rank    kv.Rank
	meta    *wire.AgentMetadata
	regions []kv.Region
	digest  [sha256.Size]byte // of the encoded metadata
	info    agent.PeerInfo
}

// interview asks the peer for all it needs to know, over one connection, and checks it. Nothing is
// added to the agent yet.
func (t *Table) interview(ctx context.Context, f *flight) (*findings, error) {
	req, err := t.dial(ctx, f.key.addr.String())
	if err != nil {
		return nil, &phaseError{phase: PhaseDial, err: ownHost(f.key.addr.host, err)}
	}
	defer req.Close()
	found := &findings{}
	if found.root, err = t.ask(ctx, req, f, kv.Rank{}, &found.clock); err != nil {
		return nil, err
	}
	if err := t.checkOffers(found.root); err != nil {
		return nil, err
	}
	for _, r := range f.target.Ranks {
		a := found.root
		if r != a.rank {
			if a, err = t.ask(ctx, req, f, r, &found.clock); err != nil {
				return nil, err
			}
			if err := t.checkOffers(a); err != nil {
				return nil, err
			}
			if err := agree(found.root, a); err != nil {
				return nil, err
			}
		}
		found.ranks = append(found.ranks, a)
	}
	return found, nil
}

func (t *Table) dial(ctx context.Context, addr string) (*zmtp.Req, error) {
	ctx, cancel := t.patience(ctx, "no connection")
	defer cancel()
	req, err := zmtp.DialReq(ctx, t.cfg.Dial, addr, zmtp.Options{
		Limits:   zmtp.Limits{MaxFrames: maxReplyFrames, MaxFrameBytes: wire.MaxHandshakePayload, MaxMessageBytes: wire.MaxHandshakePayload + 64},
		Timeouts: zmtp.Timeouts{Handshake: t.cfg.QueryTimeout, Stall: t.cfg.QueryTimeout},
	})
	if err != nil {
		return nil, bare(err)
	}
	return req, nil
}

// patience bounds one step of a handshake by QueryTimeout.
func (t *Table) patience(ctx context.Context, what string) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, t.cfg.QueryTimeout, fmt.Errorf("%s within %v", what, t.cfg.QueryTimeout))
}

// bare takes off zmtp's envelope, whose peer and phase a HandshakeError names itself.
func bare(err error) error {
	var z *zmtp.Error
	if errors.As(err, &z) {
		return z.Err
	}
	return err
}

// ask gets one rank's metadata (nixl-connector.md, section 2.4): the outer map and the hash are
// looked at before one byte of the inner map.
func (t *Table) ask(ctx context.Context, req *zmtp.Req, f *flight, r kv.Rank, best *ClockSample) (answer, error) {
	fail := func(p Phase, err error) (answer, error) { return answer{}, &phaseError{phase: p, rank: r, err: err} }
	ctx, cancel := t.patience(ctx, "no answer")
	defer cancel()
	sent := t.cfg.Clock()
	frames, err := req.Request(ctx, wire.AppendHandshakeRequest(nil, wire.HandshakeRequest{PP: r.PP, TP: r.TP}))
	received := t.cfg.Clock()
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		return fail(PhaseQuery, errHungUp)
	case err != nil:
		return fail(PhaseQuery, bare(err))
	case len(frames) != 2:
		return fail(PhaseReply, fmt.Errorf("the answer has %d frames instead of 2; another connector version may be the reason", len(frames)))
	}
	payload, err := wire.DecodeHandshakePayload(frames[0])
	if err != nil {
		return fail(PhaseReply, fmt.Errorf("%w; another connector version may be the reason", err))
	}
	remote, err := wire.DecodeClock(frames[1])
	if err != nil {
		return fail(PhaseReply, err)
	}
	best.improve(sent, received, remote)
	if t.cfg.EnforceHash && payload.CompatibilityHash != t.cfg.Hash {
		return fail(PhaseHash, &HashMismatchError{Local: t.cfg.Hash, Remote: payload.CompatibilityHash, LocalFactors: t.cfg.LocalFactors,
			Near: t.cfg.NearHashes[payload.CompatibilityHash]})
	}
	meta, err := wire.DecodeAgentMetadata(payload.AgentMetadata)
	var regions []kv.Region
	if err == nil {
		regions, err = meta.Regions() // validates
	}
	if err != nil {
		return fail(PhaseMetadata, err)
	}
	if t.cfg.Contents != "" && meta.Extension != nil && meta.AttnBackendName != t.cfg.Contents {
		return fail(PhaseHash, &ContentsError{Local: t.cfg.Contents, Remote: meta.AttnBackendName})
	}
	if meta.EngineID != f.key.engine {
		ourselves := t.cfg.Self != "" && meta.EngineID == t.cfg.Self
		wrong := error(&WrongEngineError{Want: f.key.engine, Got: meta.EngineID, Ourselves: ourselves})
		if !ourselves { // else it says so itself
			wrong = ownHost(f.key.addr.host, wrong)
		}
		return fail(PhaseIdentity, wrong)
	}
	return answer{rank: r, meta: meta, regions: regions, digest: sha256.Sum256(payload.AgentMetadata), info: peerInfo(meta)}, nil
}

// improve keeps the sample with the lowest round trip. Times are seconds: two of ours around one of
// the peer's.
func (c *ClockSample) improve(sent, received, remote float64) {
	rtt := time.Duration((received - sent) * float64(time.Second))
	if c.taken && rtt >= c.RTT {
		return
	}
	*c = ClockSample{Offset: remote - (sent+received)/2, RTT: rtt, taken: true}
}

// peerInfo is what the agent is told. A stock peer has one agent, NIXL's.
func peerInfo(meta *wire.AgentMetadata) agent.PeerInfo {
	x := meta.Extension
	if x == nil {
		return agent.PeerInfo{Offers: []agent.Offer{{Transport: stockTransport, Blob: meta.AgentMetadata}}}
	}
	info := agent.PeerInfo{HostID: x.HostID}
	for _, a := range x.Agents {
		info.Offers = append(info.Offers, agent.Offer{Transport: a.Transport, Blob: a.Blob})
	}
	return info
}

// stockTransport is the only transport of a peer without kvferry's extension.
const stockTransport = "nixl"

// checkOffers reports a rank that no transport of ours reaches, before anything more is asked.
func (t *Table) checkOffers(a answer) error {
	e := &NoTransportError{Stock: a.meta.Extension == nil}
	for _, ours := range t.cfg.Agent.Offers() {
		e.Local = append(e.Local, ours.Transport)
	}
	for _, theirs := range a.info.Offers {
		e.Remote = append(e.Remote, theirs.Transport)
		for _, ours := range e.Local {
			if ours == theirs.Transport {
				return nil
			}
		}
	}
	return &phaseError{phase: PhaseOffers, rank: a.rank, err: e}
}

// agree checks that two ranks belong to one incarnation of one engine.
func agree(root, a answer) error {
	mismatch := func(what string, x, y any) error {
		return &phaseError{phase: PhaseRanks, rank: a.rank, err: &RankMismatchError{
			A: root.rank, B: a.rank, What: what, ValueA: fmt.Sprint(x), ValueB: fmt.Sprint(y)}}
	}
	if root.meta.NumBlocks != a.meta.NumBlocks {
		return mismatch("num_blocks", root.meta.NumBlocks, a.meta.NumBlocks)
	}
	if x, y := instance(root.meta), instance(a.meta); x != y {
		return mismatch("instance", x, y)
	}
	return nil
}

func instance(m *wire.AgentMetadata) string {
	if m.Extension == nil {
		return ""
	}
	return m.Extension.Instance
}
