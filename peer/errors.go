package peer

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kvferry/kvferry/kv"
)

// ErrClosed ends the waiters of a table that is closed.
var ErrClosed = errors.New("the peer table is closed")

var (
	errHungUp        = errors.New("the peer closed the connection without an answer; a kvferry engine does so when it is asked for a rank that it does not have")
	errGoneMeanwhile = errors.New("the generation that it was about to extend is gone")
)

// Phase is where a handshake failed.
type Phase string

const (
	PhaseTarget   Phase = "target"        // what to connect makes no sense, or a limit is reached
	PhaseQueue    Phase = "queue"         // no slot or turn came in time
	PhaseDial     Phase = "dial"          // connecting, ZMTP handshake included
	PhaseQuery    Phase = "query"         // asking and waiting for the answer
	PhaseReply    Phase = "reply"         // the answer's frames, outer map, clock
	PhaseHash     Phase = "compatibility" // *HashMismatchError, *ContentsError
	PhaseMetadata Phase = "metadata"      // the inner map
	PhaseIdentity Phase = "identity"      // *WrongEngineError
	PhaseRanks    Phase = "ranks"         // *RankMismatchError
	PhaseOffers   Phase = "transports"    // *NoTransportError
	PhaseAdmit    Phase = "admission"     // agent.AddPeer
	PhaseLost     Phase = "loss"          // an agent lost the peer before the handshake ended
)

// HandshakeError is a handshake that failed. Nothing of it is left, and the next Ensure tries anew.
type HandshakeError struct {
	Engine  kv.EngineID
	Addr    string
	Phase   Phase
	Rank    kv.Rank // whom it was about; meaningful in the phases that ask or admit a rank
	Waiters int     // requests that waited for this handshake and are failed with it
	Err     error
}

func (e *HandshakeError) Error() string {
	rank := ""
	switch e.Phase {
	case PhaseTarget, PhaseQueue, PhaseDial:
	default:
		rank = fmt.Sprintf(" of rank pp %d tp %d", e.Rank.PP, e.Rank.TP)
	}
	fate := "the request waiting for it is failed"
	if e.Waiters != 1 {
		fate = fmt.Sprintf("%d requests waiting for it are failed", e.Waiters)
	}
	return fmt.Sprintf("handshake with engine %q at %s failed in %s%s: %v; %s, the next request tries again",
		e.Engine, e.Addr, e.Phase, rank, e.Err, fate)
}

func (e *HandshakeError) Unwrap() error { return e.Err }

// phaseError carries phase and rank up to where the HandshakeError is made.
type phaseError struct {
	phase Phase
	rank  kv.Rank
	err   error
}

func (e *phaseError) Error() string { return string(e.phase) + ": " + e.err.Error() }
func (e *phaseError) Unwrap() error { return e.err }

// HashMismatchError is a peer whose configuration does not fit ours, as far as the hash covers it.
type HashMismatchError struct {
	Local, Remote string
	LocalFactors  string // what went into Local; may be empty
	Near          string // the one setting that differs, if it is one of Config.NearHashes
}

func (e *HashMismatchError) Error() string {
	if e.Near != "" {
		return fmt.Sprintf("the peer's configuration differs from ours in one setting: %s (compatibility hash %.64q, ours %s)", e.Near, e.Remote, e.Local)
	}
	ours := ""
	if e.LocalFactors != "" {
		ours = " Ours: " + e.LocalFactors + "."
	}
	return fmt.Sprintf("compatibility hash of the peer is %.64q, ours is %s.%s Compare on both sides: vLLM version, connector version, "+
		"model, dtype, KV heads, head size, layers, attention backend, cache dtype, hybrid cache manager, speculative decoding, "+
		"push or pull. If they do fit, switch the check off with enforce_handshake_compat: false", e.Remote, e.Local, ours)
}

// ContentsError is a kvferry peer whose blocks have the sizes of ours and other contents. No setting
// admits it.
type ContentsError struct{ Local, Remote string }

func (e *ContentsError) Error() string {
	return fmt.Sprintf("the peer's KV blocks hold other contents than ours: its attention backend is %.64q, ours %q; start both with the same --keys", e.Remote, e.Local)
}

// WrongEngineError is an address at which another engine answers than the request names.
type WrongEngineError struct {
	Want, Got kv.EngineID
	Ourselves bool // Got is our own engine id
}

func (e *WrongEngineError) Error() string {
	if e.Ourselves {
		return fmt.Sprintf("this address leads back to our own engine %.256q: the peer announces a host that only it can use; start it with "+
			"--advertise-host HOST by which others reach it (of a stock engine, whose default is localhost: VLLM_NIXL_SIDE_CHANNEL_HOST)", e.Got)
	}
	return fmt.Sprintf("engine %.256q answers there: engine %.256q was replaced, or the address in the request is wrong; name the new id where "+
		"the request's came from, or start that engine with --engine-id %.256q", e.Got, e.Want, e.Want)
}

// OwnHostError is a handshake that failed at an address by which every host means itself.
type OwnHostError struct {
	Host string // as the request or the peer named it
	Err  error
}

func (e *OwnHostError) Error() string {
	return fmt.Sprintf("%v; %.256s is this host itself: if that engine runs on another host, start it with --side-channel HOST:PORT or "+
		"--advertise-host HOST by which others reach it (of a stock engine: VLLM_NIXL_SIDE_CHANNEL_HOST)", e.Err, e.Host)
}

func (e *OwnHostError) Unwrap() error { return e.Err }

// ownHost adds to err what may be its reason.
func ownHost(host string, err error) error {
	if kv.OwnHost(host) {
		return &OwnHostError{Host: host, Err: err}
	}
	return err
}

// NoTransportError is a peer that none of our transports reaches.
type NoTransportError struct {
	Local, Remote []string // transports offered
	Stock         bool     // the peer has no kvferry extension
}

func (e *NoTransportError) Error() string {
	who := "the peer offers"
	if e.Stock {
		who = "the peer is not kvferry and offers"
	}
	return fmt.Sprintf("no transport in common: %s %s, we offer %s", who, names(e.Remote), names(e.Local))
}

func names(s []string) string {
	if len(s) == 0 {
		return "none"
	}
	return strings.Join(s, ", ")
}

// RankMismatchError is two ranks of one engine that contradict each other.
type RankMismatchError struct {
	A, B           kv.Rank
	What           string
	ValueA, ValueB string
}

func (e *RankMismatchError) Error() string {
	return fmt.Sprintf("it differs from rank pp %d tp %d in %s (%.80q and %.80q): the engine is being restarted, or two engines share its id",
		e.A.PP, e.A.TP, e.What, e.ValueB, e.ValueA)
}
