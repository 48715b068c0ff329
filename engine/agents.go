package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"net"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/mux"
	"github.com/kvferry/kvferry/agent/shm"
	"github.com/kvferry/kvferry/agent/tcp"
)

// newAgent makes the transfer agent that Config.Transport asks for.
func newAgent(cfg Config) (agent.Agent, error) {
	if cfg.newAgent != nil {
		return cfg.newAgent(cfg)
	}
	name := agent.Name("engine-" + newUUID())
	switch cfg.Transport {
	case TransportTCP:
		return newTCP(cfg, name)
	case TransportSHM:
		a, err := shm.New(shm.Config{Name: name})
		if err != nil {
			return nil, fmt.Errorf("transport shm: %w", err)
		}
		return a, nil
	}
	return newAuto(cfg, name)
}

func newTCP(cfg Config, name agent.Name) (agent.Agent, error) {
	c := tcp.Config{Name: name, Listen: cfg.AgentListen}
	if host, _, _ := net.SplitHostPort(cfg.AgentListen); cfg.AgentAdvertise != "" {
		c.Advertise = []string{cfg.AgentAdvertise}
	} else if unspecified(host) {
		c.Advertise = []string{cfg.AdvertiseHost}
	}
	a, err := tcp.New(c)
	if err != nil {
		return nil, fmt.Errorf("transport tcp: %w", err)
	}
	return a, nil
}

// newAuto makes an agent that serves peers of this host by shared memory and others by TCP. On a
// system without what shared memory needs, it serves all of them by TCP.
func newAuto(cfg Config, name agent.Name) (agent.Agent, error) {
	overTCP, err := newTCP(cfg, name)
	if err != nil {
		return nil, err
	}
	shared, err := shm.New(shm.Config{Name: name})
	if err != nil {
		cfg.Log.Warn("no shared memory for peers on this host; they are served by tcp", slog.Any("error", err))
		return overTCP, nil
	}
	a, err := mux.New(mux.Config{
		Backends: []mux.Backend{{Agent: shared, SameHost: shm.SameHost}, {Agent: overTCP}},
		HostID:   hostID(),
	})
	if err != nil {
		return nil, errors.Join(err, shared.Close(), overTCP.Close())
	}
	return a, nil
}
