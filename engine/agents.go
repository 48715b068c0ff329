package engine

import (
	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/choose"
)

// newAgent makes the transfer agent that Config.Transport asks for.
func newAgent(cfg Config) (agent.Agent, error) {
	if cfg.newAgent != nil {
		return cfg.newAgent(cfg)
	}
	return choose.New(choose.Config{
		Name: agent.Name("engine-" + newUUID()), Transport: cfg.Transport,
		Listen: cfg.AgentListen, Advertise: cfg.AgentAdvertise, AdvertiseHost: cfg.AdvertiseHost, Log: cfg.Log,
	})
}
