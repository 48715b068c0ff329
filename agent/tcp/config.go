package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
	"github.com/kvferry/kvferry/kv"
)

// Config is an agent's settings; zero fields mean the defaults.
type Config struct {
	// Name is the agent's name, new for every incarnation. Default: random.
	Name agent.Name
	// Listen is HOST:PORT to listen on. Default 127.0.0.1:0, a free port on loopback.
	Listen string
	// Advertise is what peers are told to dial, HOST or HOST:PORT each, tried in order. Default:
	// the address that is listened on, which must then be one host's.
	Advertise []string
	// Streams is how many data connections a peer gets, 1 to 16. Default 2.
	Streams int
	// ChunkBytes is the largest chunk, 4 KiB to 8 MiB. Default 1 MiB.
	ChunkBytes int
	// Limits of what is kept.
	Limits agent.Limits

	// HandshakeTimeout bounds a connection's first frames. Default 5 s.
	HandshakeTimeout time.Duration
	// AbortTimeout bounds the wait for a peer's answer to the end of a WRITE; afterwards the peer
	// is lost. Default 5 s.
	AbortTimeout time.Duration
	// StallTimeout bounds the wait for the rest of a frame that a peer has begun to send, and for
	// a peer to take a frame. Default 30 s.
	StallTimeout time.Duration
	// UserTimeout is how long the kernel waits for a silent host (TCP_USER_TIMEOUT); keepalive
	// probes are sent every 5 s. Default 20 s.
	UserTimeout time.Duration

	dial func(ctx context.Context, addr string) (net.Conn, error) // tests route it through a relay
}

const keepalive = 5 * time.Second

func (c Config) withDefaults() Config {
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.Streams == 0 {
		c.Streams = 2
	}
	if c.ChunkBytes == 0 {
		c.ChunkBytes = 1 << 20
	}
	for _, d := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&c.HandshakeTimeout, 5 * time.Second}, {&c.AbortTimeout, 5 * time.Second},
		{&c.StallTimeout, 30 * time.Second}, {&c.UserTimeout, 20 * time.Second},
	} {
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	c.Limits = c.Limits.WithDefaults()
	if c.dial == nil {
		c.dial = func(ctx context.Context, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		}
	}
	return c
}

// Validate reports the first setting that cannot be used.
func (c Config) Validate() error {
	c = c.withDefaults()
	switch {
	case c.Streams < 1 || c.Streams > frame.MaxStreams:
		return fmt.Errorf("tcp agent: %d streams; 1 to %d are possible", c.Streams, frame.MaxStreams)
	case c.ChunkBytes < 4096 || c.ChunkBytes > frame.MaxPayload:
		return fmt.Errorf("tcp agent: chunks of %d bytes; 4096 to %d are possible", c.ChunkBytes, frame.MaxPayload)
	case c.Limits.Notification > frame.MaxNotif:
		return fmt.Errorf("tcp agent: notifications of %d bytes; at most %d are possible", c.Limits.Notification, frame.MaxNotif)
	case c.HandshakeTimeout < 0 || c.AbortTimeout < 0 || c.StallTimeout < 0 || c.UserTimeout < 0:
		return errors.New("tcp agent: a timeout is negative")
	case len(c.Name) > frame.MaxName:
		return fmt.Errorf("tcp agent: a name of %d characters; at most %d are possible", len(c.Name), frame.MaxName)
	case len(c.Advertise) > maxAddresses:
		return fmt.Errorf("tcp agent: %d addresses to advertise; at most %d are possible", len(c.Advertise), maxAddresses)
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		return fmt.Errorf("tcp agent: address %q to listen on is not HOST:PORT: %w", c.Listen, err)
	}
	return nil
}

// addresses is what to advertise for a listener's address.
func (c Config) addresses(l *net.TCPAddr) ([]string, error) {
	if len(c.Advertise) == 0 {
		if l.IP.IsUnspecified() {
			return nil, fmt.Errorf("tcp agent: it listens on every address (%s), so it must be told which to advertise", l)
		}
		return []string{l.String()}, nil
	}
	out := make([]string, len(c.Advertise))
	for i, a := range c.Advertise {
		if _, _, err := net.SplitHostPort(a); err != nil {
			a = net.JoinHostPort(kv.BareHost(a), fmt.Sprint(l.Port))
		}
		if len(a) > 255 {
			return nil, fmt.Errorf("tcp agent: address to advertise is %d characters long", len(a))
		}
		out[i] = a
	}
	return out, nil
}
