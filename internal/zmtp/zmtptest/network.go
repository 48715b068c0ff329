package zmtptest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
)

// Network is a set of listeners by address. The zero value is ready; its methods may be called by any
// goroutine.
type Network struct {
	mu struct {
		sync.Mutex
		listeners map[string]*listener
		dialled   int
	}
}

// Listen opens a listener at addr, a "host:port" that need not mean anything. A listener on which nobody
// calls Accept is a peer that answers no connection: dialling it waits until the dialler's context ends.
func (n *Network) Listen(addr string) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.listeners[addr] != nil {
		return nil, &net.OpError{Op: "listen", Net: "tcp", Addr: address(addr), Err: syscall.EADDRINUSE}
	}
	l := &listener{network: n, addr: address(addr), conns: make(chan net.Conn), done: make(chan struct{})}
	if n.mu.listeners == nil {
		n.mu.listeners = make(map[string]*listener)
	}
	n.mu.listeners[addr] = l
	return l, nil
}

// Dial connects to a listener, from the host "client". It has the type of net.Dialer.DialContext.
func (n *Network) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	return n.dial(ctx, "client", addr)
}

// From is Dial for another host's name, as the listener's side will see it.
func (n *Network) From(host string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, _, addr string) (net.Conn, error) { return n.dial(ctx, host, addr) }
}

func (n *Network) dial(ctx context.Context, host, addr string) (net.Conn, error) {
	n.mu.Lock()
	l := n.mu.listeners[addr]
	n.mu.dialled++
	from := address(fmt.Sprintf("%s:%d", host, n.mu.dialled))
	n.mu.Unlock()
	refused := func(err error) error {
		return &net.OpError{Op: "dial", Net: "tcp", Source: from, Addr: address(addr), Err: err}
	}
	if l == nil {
		return nil, refused(syscall.ECONNREFUSED)
	}
	near, far := net.Pipe()
	select {
	case l.conns <- &conn{Conn: far, local: l.addr, remote: from}:
		return &conn{Conn: near, local: from, remote: l.addr}, nil
	case <-l.done:
		return nil, refused(syscall.ECONNREFUSED)
	case <-ctx.Done():
		return nil, refused(context.Cause(ctx))
	}
}

type listener struct {
	network *Network
	addr    address
	conns   chan net.Conn
	done    chan struct{}
	once    sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: net.ErrClosed}
	}
}

func (l *listener) Close() error {
	err := errors.New("listener closed twice")
	l.once.Do(func() {
		err = nil
		close(l.done)
		l.network.mu.Lock()
		delete(l.network.mu.listeners, string(l.addr))
		l.network.mu.Unlock()
	})
	return err
}

func (l *listener) Addr() net.Addr { return l.addr }

// conn is a pipe's end with addresses.
type conn struct {
	net.Conn
	local, remote address
}

func (c *conn) LocalAddr() net.Addr  { return c.local }
func (c *conn) RemoteAddr() net.Addr { return c.remote }

type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) }
