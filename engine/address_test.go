package engine

import (
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/connector"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

func rank(n int) *int { return &n }

func TestAddressesRefused(t *testing.T) {
	for says, change := range map[string]func(*Config){
		"side channel address":                                  func(c *Config) { c.SideChannel = "10.0.0.5" },
		"is no number of 0 to 65535":                            func(c *Config) { c.SideChannel = "10.0.0.5:70000" },
		"side channel address [::]:0 is every interface":        func(c *Config) { c.SideChannel = "[::]:0" },
		"agent address 0.0.0.0:0 is every interface":            func(c *Config) { c.AgentListen = "0.0.0.0:0" },
		"advertised host 0.0.0.0 is every interface":            func(c *Config) { c.AdvertiseHost = "0.0.0.0" },
		"advertised host :: is every interface":                 func(c *Config) { c.AdvertiseHost = "[::]" },
		"advertised host 127.0.0.1 is what every host calls":    func(c *Config) { c.SideChannel, c.AdvertiseHost = "10.0.0.5:5600", "127.0.0.1" },
		"advertised host ::1 is what every host calls itself":   func(c *Config) { c.SideChannel, c.AdvertiseHost = "[fd00::5]:5600", "[::1]" },
		"advertised agent address localhost is what every host": func(c *Config) { c.AgentListen, c.AgentAdvertise = "10.0.0.5:5700", "localhost:5700" },
		"data-parallel rank is -1":                              func(c *Config) { c.DataParallelRank = rank(-1) },
		"data-parallel rank 10 make 65540, which is no port":    func(c *Config) { c.SideChannel, c.DataParallelRank = "10.0.0.5:65530", rank(10) },
	} {
		c := Config{Model: tiny()}
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
	for name, change := range map[string]func(*Config){
		"behind translation":        func(c *Config) { c.AgentListen, c.AgentAdvertise = "10.0.0.5:5700", "198.51.100.7" },
		"every interface, a name":   func(c *Config) { c.SideChannel, c.AgentListen, c.AdvertiseHost = "[::]:0", "0.0.0.0:0", "p1" },
		"an IPv6 name for both":     func(c *Config) { c.AdvertiseHost = "[fd00::5]" },
		"all on this host, by name": func(c *Config) { c.SideChannel, c.AdvertiseHost = "127.0.0.1:0", "localhost" },
	} {
		c := Config{Model: tiny()}
		change(&c)
		if err := c.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func needIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	_ = l.Close()
}

// A pair whose addresses are all IPv6 hands over in both modes; parameters name hosts without brackets,
// and are understood with them.
func TestIPv6(t *testing.T) {
	needIPv6(t)
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			x := newPair(t, func(c *Config) {
				c.Mode, c.Transport = mode, TransportTCP
				c.SideChannel, c.AgentListen, c.AdvertiseHost, c.AgentAdvertise = "[::1]:0", "[::1]:0", "[::1]", "[::1]"
			})
			if at := x.p.Coordinates(); at.Host != "::1" {
				t.Errorf("coordinates: %+v", at)
			}
			want := expect(t, prompt(40, 3), 3, model.Sampling{})
			for i, host := range []string{"::1", "[::1]"} {
				a := handOffAt(t, x, strconv.Itoa(i), prompt(40, 3), func(p *kv.TransferParams) { p.RemoteHost = host })
				checkAnswer(t, host, a, want)
			}
		})
	}
}

// handOffAt runs one hand-off in the pair's mode, with D's parameters changed.
func handOffAt(t *testing.T, x pair, id string, p []kv.Token, change func(*kv.TransferParams)) answer {
	t.Helper()
	if x.p.cfg.Mode == kv.Pull {
		prefill, decode := pullLegs(id, p, 3)
		d := decode(generate(t, x.p, prefill))
		change(d.Params)
		return generate(t, x.d, d)
	}
	prefill, decode := x.legs(id, p, 3)
	change(decode.Params)
	s := submit1(t, x.p, prefill)
	a := generate(t, x.d, decode)
	read(t, s)
	return a
}

// Two data-parallel ranks side by side: the second one's side channel and agent are one port higher, its
// id says which it is, and its hand-off parameters lead to it.
func TestDataParallelRanks(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			side, agent := freePorts(t), freePorts(t)
			change := func(n int) func(*Config) {
				return func(c *Config) {
					c.Mode, c.Transport, c.Role, c.EngineID, c.DataParallelRank = mode, TransportTCP, connector.Producer, "p", rank(n)
					c.SideChannel, c.AgentListen = net.JoinHostPort("127.0.0.1", strconv.Itoa(side)), net.JoinHostPort("127.0.0.1", strconv.Itoa(agent))
				}
			}
			ranks := []*Engine{newEngine(t, change(0)), newEngine(t, change(1))}
			d := newEngine(t, func(c *Config) { c.Mode, c.Transport, c.Role = mode, TransportTCP, connector.Consumer })
			for n, p := range ranks {
				at := p.Coordinates()
				if at.Port != side+n || at.EngineID != kv.EngineID("p_dp"+strconv.Itoa(n)) {
					t.Errorf("rank %d: %+v", n, at)
				}
				x := pair{p: p, d: d}
				a := handOffAt(t, x, strconv.Itoa(n), prompt(40, n), func(p *kv.TransferParams) {
					if p.RemotePort != side+n || p.RemoteEngineID != at.EngineID {
						t.Errorf("rank %d: parameters %+v", n, p)
					}
				})
				checkAnswer(t, "rank "+strconv.Itoa(n), a, expect(t, prompt(40, n), 3, model.Sampling{}))
			}
			if s := d.Stats(); s.Peers != 2 {
				t.Errorf("%d peers", s.Peers)
			}
		})
	}
}

// freePorts is the first of two neighbouring ports on loopback that nobody uses.
func freePorts(t *testing.T) int {
	t.Helper()
	for range 100 {
		a, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := a.Addr().(*net.TCPAddr).Port
		b, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port+1)))
		_ = a.Close()
		if err == nil {
			_ = b.Close()
			return port
		}
	}
	t.Fatal("no two neighbouring ports are free")
	return 0
}

// A hand-off that leads to another engine than it names, to nobody, or back to the one that asks, is
// refused with a line that says what to set.
func TestWrongAddresses(t *testing.T) {
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			x := newPair(t, func(c *Config) { c.Mode, c.Lease = mode, shortLease })
			nobody, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			closed := nobody.Addr().(*net.TCPAddr).Port
			_ = nobody.Close()
			for name, c := range map[string]struct {
				change func(*kv.TransferParams)
				says   []string
			}{
				"another engine": {func(p *kv.TransferParams) { p.RemoteEngineID = "replaced" },
					[]string{string(x.p.cfg.EngineID) + `" answers there`, "start that engine with --engine-id", "is this host itself"}},
				"ourselves": {func(p *kv.TransferParams) { p.RemotePort = x.d.Coordinates().Port },
					[]string{"leads back to our own engine", "--advertise-host"}},
				"nobody": {func(p *kv.TransferParams) { p.RemotePort = closed },
					[]string{"127.0.0.1 is this host itself", "--advertise-host"}},
			} {
				a := handOffAt(t, x, strings.ReplaceAll(name, " ", "-"), prompt(20, 4), c.change)
				if a.Err == nil || a.Err.Kind != KindTransfer || len(a.Tokens) != 0 {
					t.Errorf("%s: %+v", name, a.Output)
					continue
				}
				for _, says := range c.says {
					if !strings.Contains(a.Err.Error(), says) {
						t.Errorf("%s: %v\nwant %q", name, a.Err, says)
					}
				}
			}
			settle(t, x.p) // what nobody fetched: until the leases end
		})
	}
}

// Engines that tell peers a host by which every host means itself, and are not there: each hand-off ends
// with a line that says which setting of which engine to change.
func TestToldOwnHost(t *testing.T) {
	needIPv6(t)
	for _, mode := range []kv.TransferMode{kv.Push, kv.Pull} {
		for name, c := range map[string]struct {
			p, d func(*Config)
			says string
		}{
			"side channel of P": {p: func(c *Config) { c.SideChannel, c.AdvertiseHost = "[::1]:0", "127.0.0.1" }, says: "--advertise-host"},
			"agent of P":        {p: func(c *Config) { c.AgentListen, c.AgentAdvertise = "[::1]:0", "127.0.0.1" }, says: "--agent-advertise"},
			// P answers D in both modes.
			"side channel of D": {d: func(c *Config) { c.SideChannel, c.AdvertiseHost = "[::1]:0", "127.0.0.1" }, says: "--advertise-host"},
			"agent of D":        {d: func(c *Config) { c.AgentListen, c.AgentAdvertise = "[::1]:0", "127.0.0.1" }, says: "--agent-listen"},
		} {
			if mode == kv.Push && name == "agent of D" {
				continue // as its side channel, but D waits for a first contact of 30 s
			}
			t.Run(string(mode)+" "+name, func(t *testing.T) {
				t.Parallel()
				with := func(role connector.Role, change func(*Config)) *Engine {
					return newEngine(t, func(c *Config) {
						c.Mode, c.Lease, c.Transport, c.Role = mode, shortLease, TransportTCP, role
						if change != nil {
							change(c)
						}
					})
				}
				x := pair{p: with(connector.Producer, c.p), d: with(connector.Consumer, c.d)}
				a := handOffAt(t, x, "r", prompt(20, 4), func(*kv.TransferParams) {})
				switch {
				case a.Err == nil || a.Err.Kind != KindTransfer || len(a.Tokens) != 0:
					t.Errorf("%+v", a.Output)
				case !strings.Contains(a.Err.Error(), "127.0.0.1") || !strings.Contains(a.Err.Error(), c.says):
					t.Errorf("%v\nwant %s", a.Err, c.says)
				}
				settle(t, x.p)
			})
		}
	}
}
