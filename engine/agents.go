package engine

import (
	"errors"

	"github.com/kvferry/kvferry/agent"
)

func newAgent(cfg Config) (agent.Agent, error) {
	if cfg.newAgent != nil {
		return cfg.newAgent(cfg)
	}
	return nil, errors.New("no transport")
}
