package worker

import (
	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/event"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/peer"
)

// input is what happens to a machine.
type input interface{ input() }

type (
	// stepMeta: the ledger wants something done.
	stepMeta struct{ connector.StepMeta }
	// leftOut: entries of a StepMeta that need no answer did not fit into the mailbox.
	leftOut struct{}
	// connected: an engine that was asked for is connected.
	connected struct {
		addr connector.PeerAddr
		conn *peer.Connected
	}
	// connectFailed: it could not be.
	connectFailed struct {
		addr connector.PeerAddr
		err  error
	}
	// granted answers grant.
	granted struct {
		receive uint64
		grant   agent.GrantID
		err     error
	}
	// registrationFailed: the agent did not take the registration.
	registrationFailed struct {
		receive uint64
		err     error
	}
	// posted answers post.
	posted struct {
		push     uint64
		transfer agent.TransferID
		err      error
	}
	// transferResult, transferStopped, notification and peerLost are the agent's events.
	transferResult  struct{ agent.Result }
	transferStopped struct{ agent.Stopped }
	notification    struct{ agent.Notification }
	peerLost        struct{ agent.PeerLost }
	// tick: the deadline may have come.
	tick struct{}
	// shutdown: nothing new is taken, and what waits is ended.
	shutdown struct{}
)

func (stepMeta) input()           {}
func (leftOut) input()            {}
func (connected) input()          {}
func (connectFailed) input()      {}
func (granted) input()            {}
func (registrationFailed) input() {}
func (posted) input()             {}
func (transferResult) input()     {}
func (transferStopped) input()    {}
func (notification) input()       {}
func (peerLost) input()           {}
func (tick) input()               {}
func (shutdown) input()           {}

// action is what a machine wants done. A driver carries actions out in order, and answers connect,
// grant and post with an input before anything else.
type action interface{ action() }

type (
	// connect: ask for an engine, for our own work or an agent that wants to be told something; the answer
	// may be immediate.
	connect struct {
		addr  connector.PeerAddr
		ranks []kv.Rank
		by    agent.Name
	}
	// pin and unpin: work with a peer's generation begins and ends.
	pin   struct{ remote *remote }
	unpin struct{ remote *remote }
	// grant: permit the peer agent to write these ranges.
	grant struct {
		receive uint64
		peer    agent.Name
		ranges  []kv.Descriptor
	}
	// revoke: end the permission; it is over when the action is done.
	revoke struct{ grant agent.GrantID }
	// register: send a registration; only a failure is answered.
	register struct {
		receive uint64
		peer    agent.PeerID
		msg     []byte
	}
	// notify: send another notification; a failure is only an event.
	notify struct {
		engine kv.EngineID
		peer   agent.PeerID
		what   string
		msg    []byte
	}
	// post: start a WRITE of the plan from our list into the peer's.
	post struct {
		push   uint64
		remote *remote
		plan   geometry.Plan
		grant  agent.GrantID
		notif  []byte
	}
	// cancel: end a transfer early.
	cancel struct{ transfer agent.TransferID }
	// forget: the peer's prepared list is of no use any more.
	forget struct{ peer agent.PeerID }
	// lost: tell the peer table.
	lost struct {
		peer agent.PeerID
		err  error
	}
	// reportSent and reportReceived go to the ledger.
	reportSent     struct{ connector.SentReport }
	reportReceived struct{ connector.ReceiveReport }
	// reportProgress: P works on a request of ours.
	reportProgress struct{ id kv.RequestID }
	// emit: it happened.
	emit struct{ event.Event }
)

func (connect) action()        {}
func (pin) action()            {}
func (unpin) action()          {}
func (grant) action()          {}
func (revoke) action()         {}
func (register) action()       {}
func (notify) action()         {}
func (post) action()           {}
func (cancel) action()         {}
func (forget) action()         {}
func (lost) action()           {}
func (reportSent) action()     {}
func (reportReceived) action() {}
func (reportProgress) action() {}
func (emit) action()           {}
