package proxy

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kvferry/kvferry/proxy/core"
	"github.com/kvferry/kvferry/wire"
)

// Target is one engine.
type Target struct {
	// URL is its HTTP address: http://host:port, or host:port for short.
	URL string
	// Peer is what an engine cannot be asked for, as a stock one: of a prefill engine that pushes its
	// coordinates, of any other its mode. Nil: the engine answers GET /kv/coordinates; a decode engine
	// that does not is taken to work in the prefill engine's mode.
	Peer *core.Peer
}

// Config says what a Router does. Zero values take the defaults.
type Config struct {
	Prefill []Target // at least one
	Decode  []Target // at least one

	// Sequential sends D's leg when P has answered, with P's parameters, in push too. It needs no
	// coordinates, but D's part begins later.
	Sequential bool

	// Recompute asks D for all of a request whose KV could not be had: P failed, or its KV did not reach
	// D. The answer's X-Kvferry-Route says so. Without it the client gets the failure.
	Recompute bool

	PrefillPolicy core.Policy // default: a core.RoundRobin
	DecodePolicy  core.Policy // default: another one

	ConnectTimeout   time.Duration // default 5 s
	FirstByteTimeout time.Duration // default 10 min
	IdleTimeout      time.Duration // default 5 min

	// ConversationTTL is how long the router remembers what a decode engine keeps of a conversation
	// (bidirectional pull): less than engines keep it. Default 450 s for their 480 s.
	ConversationTTL time.Duration

	MaxBody      int64 // bytes of one request; default DefaultMaxBody
	MaxBodyBytes int64 // bytes of all requests at a time; default DefaultMaxBodyBytes
	MaxInFlight  int   // requests at a time; default DefaultMaxInFlight

	// ForwardHeaders are client headers that go to the engines besides the built-in ones.
	ForwardHeaders []string

	// Log gets a line per request. Default: none.
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	or := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	or(&c.ConnectTimeout, 5*time.Second)
	or(&c.FirstByteTimeout, 10*time.Minute)
	or(&c.IdleTimeout, 5*time.Minute)
	or(&c.ConversationTTL, 450*time.Second)
	if c.PrefillPolicy == nil {
		c.PrefillPolicy = &core.RoundRobin{}
	}
	if c.DecodePolicy == nil {
		c.DecodePolicy = &core.RoundRobin{}
	}
	if c.MaxBody == 0 {
		c.MaxBody = DefaultMaxBody
	}
	if c.MaxBodyBytes == 0 {
		c.MaxBodyBytes = DefaultMaxBodyBytes
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = DefaultMaxInFlight
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports everything that is wrong with a configuration.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("router config: "+format, args...)) }
	for _, pool := range []struct {
		name    string
		targets []Target
	}{{"prefill", c.Prefill}, {"decode", c.Decode}} {
		if n := len(pool.targets); n == 0 || n > maxTargets {
			bad("%d %s engines, need 1 to %d", n, pool.name, maxTargets)
		}
		seen := map[string]bool{}
		for _, t := range pool.targets {
			u, err := parseTarget(t.URL)
			if err != nil {
				bad("%s engine %q: %v", pool.name, t.URL, err)
				continue
			}
			if seen[u.Host] {
				bad("%s engine %s is named twice", pool.name, u.Host)
			}
			seen[u.Host] = true
			if t.Peer != nil {
				if _, err := checkPeer(pool.name == "decode", *t.Peer, u); err != nil {
					bad("coordinates of %s: %v", u.Host, err)
				}
			}
		}
	}
	for _, d := range []struct {
		name string
		v    time.Duration
	}{{"connect", c.ConnectTimeout}, {"first byte", c.FirstByteTimeout}, {"idle", c.IdleTimeout}, {"conversation", c.ConversationTTL}} {
		if d.v < 0 {
			bad("%s timeout is %v, must be positive", d.name, d.v)
		}
	}
	for _, h := range c.ForwardHeaders {
		if http.CanonicalHeaderKey(h) == wire.ReleaseKeyHeader {
			bad("the header %s of clients cannot go to the engines: the router makes one for each prefill leg; take it out of the forwarded headers", h)
		}
	}
	if c.MaxBody < 0 || c.MaxInFlight < 0 || c.MaxBodyBytes < c.MaxBody {
		bad("limits are %d bytes per body, %d for all, %d requests; they must be positive, and one body must fit",
			c.MaxBody, c.MaxBodyBytes, c.MaxInFlight)
	}
	return errors.Join(errs...)
}

func checkPeer(decode bool, p core.Peer, u *url.URL) (core.Peer, error) {
	if decode {
		return p, p.CheckDecode()
	}
	return p.Check(u.Hostname())
}

func parseTarget(s string) (*url.URL, error) {
	if !strings.Contains(s, "://") {
		s = "http://" + s
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return nil, err
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("scheme %q, use http or https", u.Scheme)
	case u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") != "":
		return nil, errors.New("use http://HOST:PORT")
	}
	return &url.URL{Scheme: u.Scheme, Host: u.Host}, nil
}
