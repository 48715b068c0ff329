package mux

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/agent"
)

// Auto chooses a transport for every peer.
const Auto = "auto"

// Backend is one of the agents that a Mux is made of.
type Backend struct {
	// Agent is owned by the Mux once New has succeeded: nobody else calls its methods or reads its
	// Events. If there are several, one that is Revocable must be a Granter.
	Agent agent.Agent
	// SameHost reports whether an offer of this transport was made on this host, for a backend that
	// reaches no other; nil: it reaches every host.
	SameHost func(agent.Offer) bool
}

// Granter is an agent that can give a permission under an id made elsewhere.
type Granter interface {
	// GrantAs is Agent.Grant with the id given. An id that is in use is refused.
	GrantAs(agent.GrantID, agent.GrantSpec) error
}

// Config describes a Mux.
type Config struct {
	// Backends in order of preference, at least one, all of one Name. The first allocates memory.
	Backends []Backend
	// Transport is Auto, which is the default, or the one transport to use and to offer.
	Transport string
	// HostID is what this host tells peers in agent.PeerInfo; with it a peer that tells another is
	// known to be elsewhere. May be empty.
	HostID string
	// Limits of the whole; those of the backends should be the same. Zero fields mean the defaults.
	Limits agent.Limits
}

// Validate reports what is wrong with a Config.
func (c Config) Validate() error {
	if len(c.Backends) == 0 {
		return errors.New("no transport to choose from")
	}
	known := c.Transport == "" || c.Transport == Auto
	seen := map[string]bool{}
	for _, b := range c.Backends {
		offers := b.Agent.Offers()
		if len(offers) != 1 {
			return fmt.Errorf("agent %s makes %d offers, one transport each is wanted", b.Agent.Name(), len(offers))
		}
		t := offers[0].Transport
		if seen[t] {
			return fmt.Errorf("two agents of transport %s", t)
		}
		seen[t] = true
		known = known || t == c.Transport
		if b.Agent.Name() != c.Backends[0].Agent.Name() {
			return fmt.Errorf("transport %s is of agent %s and another of agent %s: one name for all is wanted",
				t, b.Agent.Name(), c.Backends[0].Agent.Name())
		}
		if _, ok := b.Agent.(Granter); !ok && len(c.Backends) > 1 && b.Agent.Capabilities().Revocable {
			return fmt.Errorf("transport %s cannot share grants with others", t)
		}
	}
	if !known {
		return fmt.Errorf("transport %q is none of this agent's", c.Transport)
	}
	return nil
}
