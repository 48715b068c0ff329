package engine

import (
	"fmt"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/choose"
)

// newAgent makes the transfer agent that Config.Transport asks for.
func newAgent(cfg Config) (agent.Agent, error) {
	if cfg.newAgent != nil {
		return cfg.newAgent(cfg)
	}
	listen, err := cfg.ofRank(cfg.AgentListen)
	if err != nil {
		return nil, fmt.Errorf("agent address: %w", err)
	}
	advertise, err := cfg.ofRank(cfg.AgentAdvertise)
	if err != nil {
		advertise = cfg.AgentAdvertise // HOST without a port
	}
	return choose.New(choose.Config{
		Name: agent.Name("engine-" + newUUID()), Transport: cfg.Transport,
		Listen: listen, Advertise: advertise, AdvertiseHost: cfg.AdvertiseHost, Log: cfg.Log,
	})
}
