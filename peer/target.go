package peer

import (
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

// Target says which engine to connect, where it is said to be, and which of its ranks are needed.
type Target struct {
	Engine kv.EngineID
	Host   string // name or literal address; an IPv6 literal with or without brackets
	Port   int
	TP, PP int // the peer's sizes as the request names them; 0 means 1
	// By is the agent that made us ask, when it is a peer that wants an answer: its handshakes have a share of their
	// own. Empty: our own work needs the engine.
	By agent.Name
	// Ranks is whom to ask, in order, without repetition: never more than known to exist, that is
	// each below TP and PP. The slice is copied.
	Ranks []kv.Rank
}

// address is where an engine is said to be. Two spellings of one place are two addresses.
type address struct {
	host string // without brackets
	port int
}

func (a address) String() string { return net.JoinHostPort(a.host, strconv.Itoa(a.port)) }

func (t *Target) address() address {
	return address{host: kv.BareHost(t.Host), port: t.Port}
}

// validate reports a target that cannot be asked, or must not be.
func (t *Target) validate(self kv.EngineID) error {
	switch {
	case t.Engine == "":
		return errors.New("no engine id is named")
	case t.Engine == self:
		return errors.New("this is our own engine id; a request must name another engine as its peer")
	case t.Host == "":
		return errors.New("no host is named")
	case len(t.Host) > wire.MaxHostLen:
		return &agent.LimitError{What: "bytes of the host name", Got: len(t.Host), Limit: wire.MaxHostLen}
	case t.Port < 1 || t.Port > 65535:
		return fmt.Errorf("port %d is not between 1 and 65535", t.Port)
	case len(t.Ranks) == 0:
		return errors.New("no rank is named")
	case len(t.Ranks) > maxRanks:
		return &agent.LimitError{What: "ranks to ask", Got: len(t.Ranks), Limit: maxRanks}
	}
	seen := make(map[kv.Rank]bool, len(t.Ranks))
	for _, r := range t.Ranks {
		switch {
		case r.PP < 0 || r.PP >= max(t.PP, 1) || r.TP < 0 || r.TP >= max(t.TP, 1):
			return fmt.Errorf("rank pp %d tp %d is not one of an engine with pp_size %d and tp_size %d",
				r.PP, r.TP, max(t.PP, 1), max(t.TP, 1))
		case seen[r]:
			return fmt.Errorf("rank pp %d tp %d is named twice", r.PP, r.TP)
		}
		seen[r] = true
	}
	return nil
}
