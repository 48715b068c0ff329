package session

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/wire"
)

// Peers come and go under ever new names: the table stays bounded, and nothing that was counted is lost.
func TestPeerCountersAreBounded(t *testing.T) {
	h, err := New(Config{Local: testConnect("me:1"), Revocable: true, MaxPeers: 3})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	const peers = 1000
	for i := range uint64(peers) {
		name := fmt.Sprint("p:", i+1)
		hello := testConnect(name)
		h.Step(now, Message{Identity: name, Link: i + 1, Msg: &hello})
		gen := h.sessions[PeerID(name)].gen
		h.Step(now, Admitted{Peer: PeerID(name), Gen: gen, Agent: agent.PeerID{Name: agent.Name(name), Gen: gen}})
		h.Step(now, Message{Identity: name, Link: i + 1, Msg: wire.P2PConnectAck{}})
		h.Step(now, Message{Identity: name, Link: i + 1, Msg: wire.P2PDisconnect{}})
		h.Step(now, LinkEnded{Identity: name, Link: i + 1})
	}
	s := h.Stats()
	var sum Counts
	for _, c := range s.Peers {
		sum.add(&c)
	}
	if len(s.Peers) > 3+maxPastPeers+1 || sum != s.Total || sum.SessionsOpened != peers || s.Ended[Goodbye] != peers {
		t.Errorf("%d accounts, %+v of %+v, ended %v", len(s.Peers), sum, s.Total, s.Ended)
	}
}
