package engine

import (
	"errors"
	"net"
	"strings"
	"syscall"
)

// Address names one of the addresses of a Config at which an engine listens.
type Address string

// The addresses at which an engine listens, by their fields in Config.
const (
	SideChannelAddress    Address = "SideChannel"
	AgentAddress          Address = "AgentListen"
	P2PListenAddress      Address = "Tier.P2PListen"
	P2PAgentListenAddress Address = "Tier.P2PAgentListen"
)

// ListenError is why New fails when an address of the Config cannot be listened at.
type ListenError struct {
	Of  Address
	At  string // HOST:PORT, of the engine's rank
	Err error  // wraps the system's: syscall.EADDRINUSE, EADDRNOTAVAIL, …
}

func (e *ListenError) Error() string { return string(e.Of) + ": " + e.Err.Error() }
func (e *ListenError) Unwrap() error { return e.Err }

// listenError is err, and which address it is about if it is about listening; at is that of rank 0.
func (c Config) listenError(of Address, at string, err error) error {
	op := (*net.OpError)(nil)
	if !errors.Is(err, syscall.EADDRINUSE) && !(errors.As(err, &op) && op.Op == "listen" && strings.HasPrefix(op.Net, "tcp")) {
		return err
	}
	if own, fault := c.ofRank(at); fault == nil {
		at = own
	}
	return &ListenError{Of: of, At: at, Err: err}
}
