package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/kvferry/kvferry/agent"
)

// accept takes connections. Each greets in a goroutine of its own, so that a mute one delays
// nobody.
func (a *Agent) accept() {
	defer a.goroutines.Done()
	for {
		sock, err := a.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, as a rule: what is open goes on meanwhile.
			select {
			case <-a.closing:
				return
			case <-time.After(acceptPause):
			}
			continue
		}
		if sameUser(sock) != nil || !a.greet(sock) {
			_ = sock.Close()
		}
	}
}

// greet starts the hello of an accepted connection, at the cost of the oldest one if too many are
// in theirs.
func (a *Agent) greet(sock *net.UnixConn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return false
	}
	if len(a.mu.greeting) >= maxGreeting {
		_ = a.mu.greeting[0].Close()
		a.mu.greeting = slices.Delete(a.mu.greeting, 0, 1)
	}
	a.mu.greeting = append(a.mu.greeting, sock)
	a.goroutines.Go(func() {
		if err := a.hello(sock); err != nil {
			_ = sock.Close()
		}
		a.greeted(sock)
	})
	return true
}

func (a *Agent) greeted(sock *net.UnixConn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ungreet(sock)
}

// ungreet takes a connection off those in their hello. The caller holds a.mu.
func (a *Agent) ungreet(sock *net.UnixConn) {
	if i := slices.Index(a.mu.greeting, sock); i >= 0 {
		a.mu.greeting = slices.Delete(a.mu.greeting, i, i+1)
	}
}

// hello is the giver's side of a hello.
func (a *Agent) hello(sock *net.UnixConn) error {
	_ = sock.SetDeadline(time.Now().Add(helloTimeout))
	in := newReceiver(sock, a.front.Limits.Notification)
	h, page, err := receiveHello(in, kindHello)
	if err != nil {
		in.release()
		return err
	}
	a.pass(a.closing)
	c, err := a.admitInbound(h, in, page)
	if err != nil {
		in.release()
		page.drop()
		text := err.Error()
		text = text[:min(len(text), maxText)]
		_, _ = sock.Write(append(frame(nil, kindReject, len(text)), text...))
		return err
	}
	if err := a.sendHello(sock, kindWelcome); err != nil {
		c.fail(err)
	}
	_ = sock.SetDeadline(time.Time{})
	c.start() // also when it has been ended meanwhile: the reader releases what it has
	return nil
}

// admitInbound enters a peer that has said hello.
func (a *Agent) admitInbound(h hello, in *receiver, page *mapping) (*conn, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch n, limit := len(a.mu.inbound), a.front.Limits.Peers; {
	case a.mu.closed:
		return nil, agent.ErrClosed
	case h.name == a.name:
		return nil, errors.New("your name is this agent's own")
	case n >= limit:
		return nil, &agent.LimitError{What: "peers that have connected", Got: n + 1, Limit: limit}
	case a.front.Events.Congested():
		return nil, errors.New("too many events of lost peers are unread here")
	}
	c := a.newConn(agent.PeerID{Name: h.name, Gen: a.generation()}, true, in, page)
	a.mu.inbound[c.id] = c
	a.ungreet(in.sock) // it has said hello, and makes no room for others any more
	return c, nil
}

// sendHello sends HELLO or WELCOME with our control page.
func (a *Agent) sendHello(sock *net.UnixConn, k kind) error {
	h := hello{name: a.name, control: uint64(len(a.control.seg.Bytes()))}
	return sendFD(sock, h.append(nil, k), a.control.seg.FD())
}

// receiveHello waits for the other's hello and maps its control page.
func receiveHello(in *receiver, want kind) (hello, *mapping, error) {
	k, body, err := in.next()
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = errClosedByPeer
		}
		return hello{}, nil, err
	}
	if k == kindReject && want == kindWelcome {
		return hello{}, nil, fmt.Errorf("refused by the peer: %s", body)
	}
	if k != want {
		return hello{}, nil, fmt.Errorf("frame of kind %d where a hello was due", k)
	}
	h, err := decodeHello(body)
	if err != nil {
		return hello{}, nil, err
	}
	fd, err := in.takeFD()
	if err != nil {
		return hello{}, nil, err
	}
	page, err := mapSealed(fd, 0, h.control)
	if err != nil {
		return hello{}, nil, fmt.Errorf("control page: %w", err)
	}
	return h, page, nil
}

// AddPeer is Agent.AddPeer. It waits for the peer's answer until ctx ends, and for helloTimeout at
// most.
func (a *Agent) AddPeer(ctx context.Context, info agent.PeerInfo) (agent.Peer, error) {
	o, err := a.chooseOffer(info)
	if err != nil {
		return agent.Peer{}, err
	}
	fail := func(phase string, err error) (agent.Peer, error) {
		if a.front.Closed() {
			return agent.Peer{}, agent.ErrClosed
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return agent.Peer{}, &agent.PeerError{Peer: o.name, Addr: "unix socket @" + o.socket, Phase: phase, Err: err}
	}
	if err := a.makeRoom(o.name); err != nil {
		return agent.Peer{}, err
	}
	defer a.goroutines.Done()
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	sock, err := dial(ctx, o.socket)
	if err != nil {
		return fail("dial", err)
	}
	// Whatever ends the wait closes the socket; the hello then fails.
	stop := context.AfterFunc(ctx, func() { _ = sock.Close() })
	unhook := a.onClosing(sock)
	in, page, err := a.sayHello(sock, o)
	unhook()
	if !stop() && err == nil {
		page.drop()
		err = ctx.Err()
	}
	if err != nil {
		in.release()
		_ = sock.Close()
		return fail("hello", err)
	}
	return a.admit(o, in, page)
}

// PeerNames is Namer.PeerNames.
func (a *Agent) PeerNames(info agent.PeerInfo) (names []agent.Name) {
	for _, offered := range info.Offers {
		if o, err := decodeOffer(offered.Blob); offered.Transport == Transport && err == nil {
			names = append(names, o.name)
		}
	}
	return names
}

// chooseOffer finds the offer of this transport that can be reached.
func (a *Agent) chooseOffer(info agent.PeerInfo) (offer, error) {
	fail := func(name agent.Name, why error) (offer, error) {
		return offer{}, &agent.PeerError{Peer: name, Phase: "offer", Err: why}
	}
	if a.front.Closed() {
		return offer{}, agent.ErrClosed
	}
	i := slices.IndexFunc(info.Offers, func(o agent.Offer) bool { return o.Transport == Transport })
	if i < 0 {
		return fail("", errors.New("the peer offers no shared memory"))
	}
	o, err := decodeOffer(info.Offers[i].Blob)
	if err != nil {
		return fail("", err)
	}
	host, err := thisHost()
	switch {
	case err != nil:
		return fail(o.name, err)
	case o.name == a.name:
		return fail(o.name, errors.New("it is this agent itself"))
	case o.host != host:
		return fail(o.name, errors.New("the peer is on another host or in another network namespace"))
	}
	return o, nil
}

// makeRoom removes the old generation of a peer, or finds that there is no room for another. On
// success the caller counts as one of the agent's goroutines.
func (a *Agent) makeRoom(name agent.Name) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return agent.ErrClosed
	}
	if old := a.mu.peers[name]; old != nil {
		a.remove(old, agent.OutcomePeerLost, errRemoved)
	}
	if n, limit := len(a.mu.peers), a.front.Limits.Peers; n >= limit {
		return &agent.LimitError{What: "added peers", Got: n + 1, Limit: limit}
	}
	a.goroutines.Add(1)
	return nil
}

func dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", "@"+socket)
	if err != nil {
		return nil, err
	}
	sock := c.(*net.UnixConn)
	if err := sameUser(sock); err != nil {
		_ = sock.Close()
		return nil, err
	}
	return sock, nil
}

// onClosing closes a socket when the agent closes, until unhooked.
func (a *Agent) onClosing(sock *net.UnixConn) (unhook func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		_ = sock.Close()
	} else {
		a.mu.dialing[sock] = struct{}{}
	}
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.mu.dialing, sock)
	}
}

// sayHello is the poster's side of a hello.
func (a *Agent) sayHello(sock *net.UnixConn, o offer) (*receiver, *mapping, error) {
	in := newReceiver(sock, a.front.Limits.Notification)
	a.pass(a.closing)
	if err := a.sendHello(sock, kindHello); err != nil {
		return in, nil, err
	}
	h, page, err := receiveHello(in, kindWelcome)
	if err != nil {
		return in, nil, err
	}
	if h.name != o.name {
		page.drop()
		return in, nil, fmt.Errorf("agent %s answers instead", h.name)
	}
	return in, page, nil
}

// admit enters a peer that has answered.
func (a *Agent) admit(o offer, in *receiver, page *mapping) (agent.Peer, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	// Another AddPeer of the same name may have been faster.
	if old := a.mu.peers[o.name]; old != nil {
		a.remove(old, agent.OutcomePeerLost, errRemoved)
	}
	var err error
	if n, limit := len(a.mu.peers), a.front.Limits.Peers; n >= limit {
		err = &agent.LimitError{What: "added peers", Got: n + 1, Limit: limit}
	}
	if a.mu.closed {
		err = agent.ErrClosed
	}
	if err != nil {
		in.release()
		page.drop()
		_ = in.sock.Close()
		return agent.Peer{}, err
	}
	c := a.newConn(agent.PeerID{Name: o.name, Gen: a.generation()}, false, in, page)
	a.mu.peers[o.name] = c
	c.start()
	return agent.Peer{ID: c.id, Transport: Transport, Why: "same host"}, nil
}
