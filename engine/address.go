package engine

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/kv"
)

// MaxDataParallelRank bounds Config.DataParallelRank: ports end at 65535, and each rank needs its own.
const MaxDataParallelRank = 4095

// checkAddresses reports addresses that peers cannot be told.
func (c Config) checkAddresses(bad func(format string, args ...any)) {
	rank := 0
	if c.DataParallelRank != nil {
		if rank = *c.DataParallelRank; rank < 0 || rank > MaxDataParallelRank {
			bad("data-parallel rank is %d, must be 0 to %d", rank, MaxDataParallelRank)
			rank = 0
		}
	}
	for _, a := range []struct{ name, addr, advertise string }{
		{"side channel", c.SideChannel, c.AdvertiseHost}, {"agent", c.AgentListen, c.AdvertiseHost + c.AgentAdvertise},
	} {
		host, _, err := net.SplitHostPort(a.addr)
		if err == nil {
			_, err = c.ofRank(a.addr)
		}
		switch {
		case err != nil:
			bad("%s address: %v, use HOST:PORT", a.name, err)
		case unspecified(host) && a.advertise == "":
			bad("%s address %s is every interface; name the host by which peers reach it", a.name, a.addr)
		}
	}
	agentHost, _, err := net.SplitHostPort(c.AgentAdvertise)
	if err != nil {
		agentHost = c.AgentAdvertise // HOST without a port
	} else if _, err := c.ofRank(c.AgentAdvertise); err != nil {
		bad("advertised agent address: %v, use HOST or HOST:PORT", err)
	}
	for _, a := range []struct{ name, host, listen string }{
		{"advertised host", c.AdvertiseHost, c.SideChannel}, {"advertised agent address", agentHost, c.AgentListen},
	} {
		listen, _, _ := net.SplitHostPort(a.listen)
		switch {
		case unspecified(a.host):
			bad("%s %s is every interface, which no peer can dial; name the host by which peers reach this one", a.name, a.host)
		case a.host != "" && kv.OwnHost(a.host) && !kv.OwnHost(listen):
			bad("%s %s is what every host calls itself, but it listens at %s for peers on other hosts; name the host by which they reach it", a.name, a.host, a.listen)
		}
	}
}

// ofRank is the address of this data-parallel rank, of that of rank 0. Port 0 stays: every rank picks
// a free one.
func (c Config) ofRank(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return "", fmt.Errorf("port %q of %s is no number of 0 to 65535", port, addr)
	}
	if c.DataParallelRank == nil || n == 0 {
		return addr, nil
	}
	if n += uint64(*c.DataParallelRank); n > 65535 {
		return "", fmt.Errorf("port %s of %s and data-parallel rank %d make %d, which is no port", port, addr, *c.DataParallelRank, n)
	}
	return net.JoinHostPort(host, strconv.FormatUint(n, 10)), nil
}

// rankID is the engine id of this data-parallel rank.
func (c Config) rankID() kv.EngineID {
	if c.DataParallelRank == nil {
		return c.EngineID
	}
	suffix := fmt.Sprintf("_dp%d", *c.DataParallelRank)
	return kv.EngineID(strings.TrimSuffix(string(c.EngineID), suffix) + suffix)
}

// unspecified tells whether a host to listen on is no host to connect to.
func unspecified(host string) bool {
	ip := net.ParseIP(kv.BareHost(host))
	return ip != nil && ip.IsUnspecified()
}

// hostOf is the host of a bound address as peers dial it, an IPv6 zone included.
func hostOf(a *net.TCPAddr) string {
	if a.Zone != "" {
		return a.IP.String() + "%" + a.Zone
	}
	return a.IP.String()
}
