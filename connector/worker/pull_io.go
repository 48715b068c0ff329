package worker

import (
	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/geometry"
	"github.com/kvferry/kvferry/kv"
)

type (
	// lent answers lend.
	lent struct {
		claim uint64
		grant agent.GrantID
		err   error
	}
	// readPosted answers read.
	readPosted struct {
		fetch    uint64
		transfer agent.TransferID
		err      error
	}
)

func (lent) input()       {}
func (readPosted) input() {}

type (
	// lend: permit the peer agent to read these ranges.
	lend struct {
		claim  uint64
		peer   agent.Name
		ranges []kv.Descriptor
	}
	// read: start a READ of the plan from the peer's list into ours.
	read struct {
		fetch  uint64
		remote *remote
		plan   geometry.Plan
		grant  agent.GrantID
		notif  []byte
	}
)

func (lend) action() {}
func (read) action() {}

// lend carries out a lend.
func (x *writer) lend(a lend) {
	id, err := x.cfg.Agent.Grant(agent.GrantSpec{Peer: a.peer, Access: agent.AccessRead, Ranges: a.ranges})
	x.answer(lent{a.claim, id, err})
}

// read carries out a read.
func (x *writer) read(a read) {
	id, err := x.transfer(agent.Read, a.remote, a.plan, a.grant, a.notif)
	x.answer(readPosted{a.fetch, id, err})
}
