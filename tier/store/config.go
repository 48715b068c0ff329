package store

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/tier/fs"
	"github.com/kvferry/kvferry/tier/store/intake"
)

// Config of a Store.
type Config struct {
	// Listener receives from peers; the store takes it over. Required.
	Listener net.Listener
	// Name is the "host:port" by which peers reach the Listener. Required.
	Name string
	// Size is the memory for blocks, bytes, for all namespaces together. Required.
	Size int64
	// Namespaces is how many models' blocks are held at most. 0: 1.
	Namespaces int
	// Folder keeps the blocks in files; "": memory only. FolderSize bounds it, bytes.
	Folder     string
	FolderSize int64
	// Agent makes the agent of the n-th namespace, from 0; the store closes it. An agent is made again
	// for the same n after its predecessor was closed. Required.
	Agent func(n int) (agent.Agent, error)
	// Instance and HostID are those of p2p.Config.
	Instance, HostID string
	// Intake bounds what is fetched.
	Intake intake.Config
	// Unused is how long a namespace that holds nothing must have had no peer to give way. 0: DefaultUnused.
	Unused time.Duration
	// PingEvery is that of p2p.Config.
	PingEvery time.Duration
	// OnNote is told what happens, from any goroutine. It must not block. nil: nobody.
	OnNote func(Note)
}

// Validate reports a configuration that cannot work.
func (c Config) Validate() error {
	switch {
	case c.Listener == nil || c.Agent == nil || c.Name == "" || c.Instance == "":
		return errors.New("store: no listener, agent, name or instance")
	case c.Size < 1:
		return fmt.Errorf("store: a size of %d bytes", c.Size)
	case c.Namespaces < 0 || c.Namespaces > MaxNamespaces:
		return fmt.Errorf("store: %d namespaces, 1 to %d are possible", c.Namespaces, MaxNamespaces)
	case c.Folder != "" && c.FolderSize < 1:
		return fmt.Errorf("store: a folder of %d bytes", c.FolderSize)
	case c.Unused < 0:
		return fmt.Errorf("store: namespaces give way after %v", c.Unused)
	}
	return c.Intake.Validate()
}

// Note tells people what has happened.
type Note struct {
	What      string // a stable snake_case name
	Namespace string // "" for none
	Peer      string // "" for none
	Text      string
	Bad       bool // somebody should look at it
}

// Stats of a store.
type Stats struct {
	Refused    uint64 // connections
	Namespaces []NamespaceStats
}

// NamespaceStats of one namespace; those of an opening one are zero but for the facts.
type NamespaceStats struct {
	Facts    Facts
	Open     bool
	Peers    int   // connections
	BlockLen int64 // bytes
	// Slots is how many blocks fit into memory, Ready how many are there, Pinned how many of these are
	// in use. Loads and Stores are under way.
	Slots, Ready, Pinned, Quarantined, Loads, Stores int
	Evicted, FailedLoads                             uint64
	Intake                                           intake.Stats
	Files                                            *fs.Stats // nil: none
}
