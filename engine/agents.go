package engine

import (
	"net"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp"
)

// newAgent makes the transfer agent. "auto" is tcp as long as that is all there is.
func newAgent(cfg Config) (agent.Agent, error) {
	if cfg.newAgent != nil {
		return cfg.newAgent(cfg)
	}
	c := tcp.Config{Listen: cfg.AgentListen}
	if host, _, _ := net.SplitHostPort(cfg.AgentListen); cfg.AgentAdvertise != "" {
		c.Advertise = []string{cfg.AgentAdvertise}
	} else if unspecified(host) {
		c.Advertise = []string{cfg.AdvertiseHost}
	}
	return tcp.New(c)
}
