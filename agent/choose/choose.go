// Package choose makes the agent that a node's configuration asks for: shared memory, TCP, or both with
// the right one chosen for each peer.
//
//	Config ── shm ──> shm
//	       ── tcp ──> tcp
//	       ── auto ─> mux(shm for peers of this host, tcp for others)
package choose

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/mux"
	"github.com/kvferry/kvferry/agent/shm"
	"github.com/kvferry/kvferry/agent/tcp"
)

// Transports are what Config.Transport may be.
var Transports = []string{mux.Auto, shm.Transport, tcp.Transport}

// Config says which agent is wanted. Only Name is always required.
type Config struct {
	Name agent.Name
	// Transport is one of Transports; "": auto.
	Transport string
	// Listen is the "host:port" where TCP peers reach the agent. Advertise is the "host[:port]" that
	// they are told; "": AdvertiseHost, where Listen is every interface, else Listen.
	Listen, Advertise, AdvertiseHost string
	// Log is warned when there is no shared memory for auto. nil: nobody is.
	Log *slog.Logger
}

// New makes an agent. The caller closes it.
func New(c Config) (agent.Agent, error) {
	switch c.Transport {
	case tcp.Transport:
		return c.tcp()
	case shm.Transport:
		a, err := shm.New(shm.Config{Name: c.Name})
		if err != nil {
			return nil, fmt.Errorf("transport shm: %w", err)
		}
		return a, nil
	case mux.Auto, "":
		return c.auto()
	}
	return nil, fmt.Errorf("transport %q is unknown, use %s", c.Transport, strings.Join(Transports, ", "))
}

func (c Config) tcp() (agent.Agent, error) {
	t := tcp.Config{Name: c.Name, Listen: c.Listen}
	if host, _, _ := net.SplitHostPort(c.Listen); c.Advertise != "" {
		t.Advertise = []string{c.Advertise}
	} else if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		t.Advertise = []string{c.AdvertiseHost}
	}
	a, err := tcp.New(t)
	if err != nil {
		return nil, fmt.Errorf("transport tcp: %w", err)
	}
	return a, nil
}

// auto serves peers of this host by shared memory and others by TCP; on a system without what shared
// memory needs, all of them by TCP.
func (c Config) auto() (agent.Agent, error) {
	overTCP, err := c.tcp()
	if err != nil {
		return nil, err
	}
	shared, err := shm.New(shm.Config{Name: c.Name})
	if err != nil {
		if c.Log != nil {
			c.Log.Warn("no shared memory for peers on this host; they are served by tcp", slog.Any("error", err))
		}
		return overTCP, nil
	}
	a, err := mux.New(mux.Config{
		Backends: []mux.Backend{{Agent: shared, SameHost: shm.SameHost}, {Agent: overTCP}},
		HostID:   HostID(),
	})
	if err != nil {
		return nil, errors.Join(err, shared.Close(), overTCP.Close())
	}
	return a, nil
}

// HostID is equal for processes that can share memory: those of one kernel and network namespace. ""
// where that cannot be known.
func HostID() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	ns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(boot)) + " " + ns
}
