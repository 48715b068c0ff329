package worker

import (
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// An agent is lost that has two claims on a hold whose lease has ended, one of them read: the hold ends
// once. It is kept until then because the agent cannot take back what it has lent.
func TestHoldOfSeveralLostClaimsEndsOnce(t *testing.T) {
	cfg := machineConfig()
	cfg.Mode = kv.Pull
	var sent []connector.SentReport
	grants := byte(0)
	r := newRig(cfg, func(a action) input {
		switch a := a.(type) {
		case lend:
			grants++
			return lent{a.claim, agent.GrantID{grants}, nil}
		case reportSent:
			sent = append(sent, a.SentReport)
		}
		return nil
	})
	r.m.irrevocable = true
	blocks := kv.BlockIDs{{2, 3}}
	r.step(stepMeta{connector.StepMeta{Finished: []connector.FinishedBlocks{
		{ID: "p", Blocks: blocks, NumTokens: 8, Lease: 30 * time.Second, Generation: 1, Digest: connector.Digest{1}}}}})
	for n := range kv.Generation(2) {
		r.step(from("r.0", controlOf(t, &wire.Claim{Seq: uint64(n) + 1, From: wire.Sender{Engine: "R", Host: "h", Port: 5600, TP: 1},
			RegistrationRef: testRef("p", n+1), Tokens: 8, Readers: 3, Blocks: wire.BlocksDigest(blocks), Digest: connector.Digest{1}})))
	}
	r.step(from("r.0", controlOf(t, &wire.ReadDone{RegistrationRef: testRef("p", 2)})))
	r.pass(time.Minute)
	if len(sent) != 0 || grants != 2 {
		t.Fatalf("%d permissions; reported as sent under a READ: %v", grants, sent)
	}
	r.lose("r.0", 1, false)
	if len(sent) != 1 || r.m.snapshot().Held != 0 {
		t.Errorf("reported %v; %d held", sent, r.m.snapshot().Held)
	}
}
