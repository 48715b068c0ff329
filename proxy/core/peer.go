package core

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
)

// Peer is a prefill engine's coordinates: where a decode engine reaches its side channel, and how it
// is sharded. Its JSON form is the answer of the engine's /kv/coordinates; other keys are ignored.
type Peer struct {
	EngineID kv.EngineID     `json:"engine_id"`
	Host     string          `json:"host"`
	Port     int             `json:"port"`
	TPSize   int             `json:"tp_size"`
	PPSize   int             `json:"pp_size"` // 0: not told, 1
	Mode     kv.TransferMode `json:"transfer_mode"`
	Role     string          `json:"role"`
}

// Check completes coordinates that an engine told about itself and refuses those that no decode
// engine could use. An engine that listens on every address, or tells no host, is reached where the
// router reaches it: at httpHost. In pull everything but mode and role is P's to tell with each answer.
func (p Peer) Check(httpHost string) (Peer, error) {
	p.Host = kv.BareHost(p.Host)
	if a, err := netip.ParseAddr(p.Host); p.Host == "" || err == nil && a.IsUnspecified() {
		p.Host = httpHost
	}
	if p.PPSize == 0 {
		p.PPSize = 1
	}
	switch {
	case p.Role == "decode":
		return p, fmt.Errorf("role is %q: a decode engine stands in the prefill pool", p.Role)
	case p.Mode == kv.Pull:
		return p, nil
	case p.Mode != "" && p.Mode != kv.Push:
		return p, fmt.Errorf("transfer_mode is %q, use push or pull", p.Mode)
	case p.EngineID == "" || len(p.EngineID) > MaxText:
		return p, fmt.Errorf("engine_id has %d bytes, must have 1 to %d", len(p.EngineID), MaxText)
	case p.Host == "" || len(p.Host) > MaxText:
		return p, fmt.Errorf("host has %d bytes, must have 1 to %d", len(p.Host), MaxText)
	case p.Port < 1 || p.Port > 65535:
		return p, fmt.Errorf("port is %d, must be 1 to 65535", p.Port)
	case p.TPSize < 1 || p.TPSize > MaxRanks:
		return p, fmt.Errorf("tp_size is %d, must be 1 to %d", p.TPSize, MaxRanks)
	case p.PPSize < 1 || p.PPSize > MaxRanks:
		return p, fmt.Errorf("pp_size is %d, must be 1 to %d", p.PPSize, MaxRanks)
	}
	return p, nil
}

// CheckDecode refuses coordinates of a decode engine that cannot be one. Only its mode matters.
func (p Peer) CheckDecode() error {
	switch {
	case p.Mode != "" && p.Mode != kv.Push && p.Mode != kv.Pull:
		return fmt.Errorf("transfer_mode is %q, use push or pull", p.Mode)
	case p.Role == "prefill":
		return fmt.Errorf("role is %q: a prefill engine stands in the decode pool", p.Role)
	}
	return nil
}

// Pair tells in which mode two engines work together, or why they do not. An engine that does not
// tell its mode works in the other's; if neither does, it is push.
func Pair(p, d Peer) (kv.TransferMode, error) {
	mode := cmp.Or(p.Mode, d.Mode, kv.Push)
	if d.Mode != "" && d.Mode != mode {
		return mode, fmt.Errorf("the prefill engine is in transfer mode %s, the decode engine in %s: start both with --mode %[1]s, or both with --mode %[2]s "+
			"(stock engines: with the push or the pull connector of NIXL)", mode, d.Mode)
	}
	return mode, nil
}

// CheckClientRequestID says what is wrong with a client's X-Request-Id. It becomes part of ids that
// engines join with commas and write into logs.
func CheckClientRequestID(id string) error {
	bad := func(what string) error {
		return &openai.Error{
			Status: 400, Type: openai.TypeInvalidRequest, Param: "X-Request-Id", Code: openai.CodeInvalidValue,
			Message: "The header X-Request-Id " + what + ".",
		}
	}
	if len(id) > MaxClientRequestID {
		return bad(fmt.Sprintf("has %d characters; at most %d are possible", len(id), MaxClientRequestID))
	}
	for _, c := range []byte(id) {
		if c <= ' ' || c >= 0x7f || c == ',' {
			return bad(fmt.Sprintf("has the character %q; printable ASCII without space and comma is possible", c))
		}
	}
	return nil
}

// LegRequestID is the X-Request-Id of both legs of an attempt: unique is a UUID made for it. A
// client's own id only leads it, so that clients that repeat theirs cannot mix up two requests. A
// UUID ends in twelve digits and so is never taken for an engine's suffix of eight.
func LegRequestID(client, unique string) kv.RequestID {
	if client == "" {
		return kv.RequestID(unique)
	}
	return kv.RequestID(client + "." + unique)
}
