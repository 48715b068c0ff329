package agenttest

import (
	"testing"
	"testing/synctest"

	"github.com/kvferry/kvferry/agent"
)

// Net makes agents that can reach each other, and does to them what networks and machines do.
type Net struct {
	// New makes an agent. The suite closes it.
	New func(t testing.TB, limits agent.Limits) agent.Agent
	// Stall makes an agent mute and deaf, as a stopped process: nothing to it or from it passes,
	// and nobody is told, until resume is called.
	Stall func(t testing.TB, a agent.Agent) (resume func())
	// Kill ends an agent as a dying process. The suite still calls its Close.
	Kill func(t testing.TB, a agent.Agent)
}

// Factory makes a network for one test.
type Factory func(t testing.TB) Net

// Options tell what the backend allows the suite to do.
type Options struct {
	// Bubble: the backend waits for nothing outside of the process, so that each test runs in a
	// testing/synctest bubble.
	Bubble bool
}

// Run checks a backend.
func Run(t *testing.T, factory Factory, opts Options) {
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"ScatterGather", scatterGather},
		{"BorrowedMemory", borrowedMemory},
		{"NotificationAfterData", notificationAfterData},
		{"ReadNotifies", readNotifies},
		{"NotificationsInOrder", notificationsInOrder},
		{"LastWords", lastWords},
		{"OutcomeDone", outcomeDone},
		{"OutcomeFailed", outcomeFailed},
		{"OutcomeDeadline", outcomeDeadline},
		{"OutcomeCancelled", outcomeCancelled},
		{"OutcomePeerLost", outcomePeerLost},
		{"OutcomeClosed", outcomeClosed},
		{"RevokeIsExact", revokeIsExact},
		{"RevokeDuringTransfer", revokeDuringTransfer},
		{"RevokeDoesNotWaitForPeer", revokeDoesNotWaitForPeer},
		{"GrantsAreObeyed", grantsAreObeyed},
		{"FreedMemoryIsNotReached", freedMemoryIsNotReached},
		{"DeregisterWaitsForStopped", deregisterWaitsForStopped},
		{"RemovePeer", removePeer},
		{"Generations", generations},
		{"RemoveInboundPeer", removeInboundPeer},
		{"PeerDies", peerDies},
		{"FailedAdmissionLeavesNothing", failedAdmission},
		{"NamesBeforeAdmission", namesBeforeAdmission},
		{"NotificationOverflow", notificationOverflow},
		{"SlowReader", slowReader},
		{"MutePeerDelaysNobody", mutePeerDelaysNobody},
		{"NotifyToMutePeerIsBounded", notifyToMutePeerIsBounded},
		{"HostileIndices", hostileIndices},
		{"Limits", limitsHold},
		{"BusyThenFree", busyThenFree},
		{"CloseByTheReader", closeByTheReader},
		{"Closed", closedAgent},
		{"ManyAtOnce", manyAtOnce},
	} {
		t.Run(c.name, func(t *testing.T) {
			body := func(t *testing.T) {
				s := &suite{T: t, net: factory(t)}
				// Agents close before the test (and a bubble) ends, while t can still fail.
				defer s.finish()
				c.test(s)
			}
			if opts.Bubble {
				synctest.Test(t, body)
			} else {
				t.Parallel()
				body(t)
			}
		})
	}
}

// suite is one running test.
type suite struct {
	*testing.T
	net   Net
	nodes []*node
}

// finish closes all agents and checks what they have told.
func (s *suite) finish() {
	for _, n := range s.nodes {
		n.close()
	}
	if s.Failed() {
		return
	}
	for _, n := range s.nodes {
		n.check(s.T)
	}
}

func (s *suite) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}
