package zmtp

import "fmt"

// Options configures a socket. The zero value is good.
type Options struct {
	// Identity is the name under which a ROUTER at the other end knows us: raw bytes, at most 255, the first
	// not zero. Empty: the ROUTER invents one. A Router of ours may leave it empty.
	Identity string

	Limits    Limits
	Timeouts  Timeouts
	Heartbeat Heartbeat

	// OnPong, if set, is called for each PONG, by the goroutine of the connection. It must not block.
	OnPong func()

	// OnEnd, if set, is called once for each connection that a Router accepted, with why it ended: io.EOF
	// when the peer closed it, [ErrClosed] at Close, else an error that says what the peer did. Peer is
	// zero if the handshake was not finished; addr is the remote address. It is called by the goroutine of
	// that connection (or of the listener, for one refused at once), after the connection's last message was
	// queued and its identity was given back. It must not block and must not call Close.
	OnEnd func(peer Peer, addr string, err error)
}

// settled returns the options with defaults filled in, or what is wrong with them.
func (o Options) settled() (Options, error) {
	if err := validIdentity(o.Identity); err != nil {
		return o, err
	}
	for _, err := range []error{o.Limits.validate(), o.Timeouts.validate(), o.Heartbeat.validate()} {
		if err != nil {
			return o, fmt.Errorf("zmtp options: %w", err)
		}
	}
	o.Limits = o.Limits.withDefaults()
	o.Timeouts = o.Timeouts.withDefaults()
	o.Heartbeat = o.Heartbeat.withDefaults()
	return o, nil
}

func validIdentity(id string) error {
	if len(id) > maxIdentityBytes {
		return fmt.Errorf("identity has %d bytes, at most %d are allowed", len(id), maxIdentityBytes)
	}
	if id != "" && id[0] == 0 {
		return fmt.Errorf("identity %q begins with a zero byte, which is kept for invented identities", id)
	}
	return nil
}
