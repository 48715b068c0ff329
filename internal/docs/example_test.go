package docs

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp"
	"github.com/kvferry/kvferry/kv"
)

// The README shows the part between the two marks; TestReadmeShowsTheExample compares them.
func Example() {
	// README begin
	// Two agents: in reality each lives in an engine of its own, and a handshake carries the offers.
	p, err := tcp.New(tcp.Config{Listen: "127.0.0.1:0"})
	check(err)
	defer p.Close()
	d, err := tcp.New(tcp.Config{Listen: "127.0.0.1:0"})
	check(err)
	defer d.Close()

	// Memory that the agents map and register: 8 blocks of 4 KiB each.
	const block, blocks = 4096, 8
	pm, err := p.Alloc(blocks * block)
	check(err)
	dm, err := d.Alloc(blocks * block)
	check(err)
	table := func(base uint64) (rows []kv.Descriptor) {
		for i := range uint64(blocks) {
			rows = append(rows, kv.Descriptor{Addr: base + i*block, Length: block})
		}
		return rows
	}

	// P admits D and prepares both descriptor lists, once.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	peer, err := p.AddPeer(ctx, agent.PeerInfo{Offers: d.Offers()})
	check(err)
	local, err := p.Prepare(agent.Local, table(pm.Addr()))
	check(err)
	remote, err := p.Prepare(peer.ID, table(dm.Addr()))
	check(err)

	// D permits P, and nobody else, to write its blocks 5 and 2.
	rows := table(dm.Addr())
	grant, err := d.Grant(agent.GrantSpec{Peer: p.Name(), Access: agent.AccessWrite, Ranges: []kv.Descriptor{rows[5], rows[2]}})
	check(err)

	// P writes its blocks 0 and 1 there.
	copy(pm.Bytes(), "block zero")
	copy(pm.Bytes()[block:], "block one")
	_, err = p.Post(agent.Transfer{
		Op: agent.Write, Local: local, LocalIdx: []uint32{0, 1}, Remote: remote, RemoteIdx: []uint32{5, 2},
		Grant: grant, Notif: []byte("there"), Silence: 5 * time.Second,
	})
	check(err)

	// The notification comes after the bytes. When Revoke has returned, nobody writes there any more.
	for e := range d.Events() {
		if n, ok := e.(agent.Notification); ok {
			d.Revoke(grant)
			fmt.Printf("%s: %d bytes over %s: %.9s, %.10s\n", n.Msg, n.Arrival.Bytes, peer.Transport, dm.Bytes()[2*block:], dm.Bytes()[5*block:])
			break
		}
	}
	// README end

	// Output: there: 8192 bytes over tcp: block one, block zero
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
