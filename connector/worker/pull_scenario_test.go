package worker

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// readMeta adds what a pull ledger wants.
func (s *scenario) readMeta(t *testing.T, d *datadriven.TestData, m *connector.StepMeta, peer connector.PeerAddr, digest connector.Digest) {
	id, ok := arg(d, "read")
	remote, _ := arg(d, "remote")
	readers := argInt(t, d, "readers", 1)
	for i := range m.Withdrawn {
		m.Withdrawn[i].Readers = readers
	}
	if n := argInt(t, d, "prefixes", -1); n >= 0 {
		m.Finished[0].Earlier = true
		for i := range n {
			m.Finished[0].Prefixes = append(m.Finished[0].Prefixes, connector.Digest{100 + byte(i)})
		}
	}
	if !ok {
		return
	}
	from, _ := arg(d, "from")
	m.Reads = []connector.Read{{
		Registration: connector.Registration{ID: kv.RequestID(id), Blocks: argBlocks(t, d), StartToken: argInt(t, d, "start", 0),
			NumTokens: argInt(t, d, "tokens", 0), Digest: digest, Peer: peer, Lease: kv.Generation(argInt(t, d, "lease", 0))},
		Remote: kv.RequestID(remote), RemoteBlocks: kv.BlockIDs{blockList(t, d, from)}, Readers: readers,
	}}
	_, m.Reads[0].Earlier = arg(d, "earlier")
	if n := argInt(t, d, "expiry", -1); n >= 0 {
		at := float64(n)
		m.Reads[0].Expiry = &at
	}
}

// claimMessage is a control message of pull, or nil.
func (s *scenario) claimMessage(t *testing.T, d *datadriven.TestData, us wire.Sender) wire.Notification {
	seq, gen := uint64(argInt(t, d, "seq", 1)), kv.Generation(argInt(t, d, "gen", 1))
	if id, ok := arg(d, "claim"); ok {
		us.TP = argInt(t, d, "tp", 1)
		return &wire.Claim{Seq: seq, From: us, RegistrationRef: theirRef(d, id, gen), Lease: kv.Generation(argInt(t, d, "lease", 0)),
			Tokens: argInt(t, d, "tokens", 0), Readers: argInt(t, d, "readers", 1), Digest: connector.Digest{byte(argInt(t, d, "digest", 0))},
			Blocks: wire.BlocksDigest(argBlocks(t, d))}
	}
	if id, ok := arg(d, "taken"); ok {
		return &wire.ReadDone{RegistrationRef: theirRef(d, id, gen)}
	}
	if id, ok := arg(d, "claimed"); ok {
		return &wire.Claimed{Seq: seq, RegistrationRef: s.m.ourRef(kv.RequestID(id), gen), Grant: [16]byte{byte(argInt(t, d, "grant", 9))}}
	}
	return nil
}

func showPull(a action) string {
	switch a := a.(type) {
	case lend:
		var at []string
		for _, r := range a.ranges {
			at = append(at, fmt.Sprint((r.Addr-4096)/64))
		}
		return fmt.Sprintf("lend claim=%d to %s: blocks %s", a.claim, a.peer, strings.Join(at, " "))
	case read:
		return fmt.Sprintf("read fetch=%d from %s: %v <- %v grant %d notif %s", a.fetch, a.remote.name(), a.plan.Local, a.plan.Remote, a.grant[0], showMsg(a.notif))
	}
	return ""
}
