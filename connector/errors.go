package connector

import (
	"fmt"

	"github.com/kvferry/kvferry/kv"
)

// Phase is where in a hand-off something failed.
type Phase string

const (
	PhaseParams       Phase = "params"       // the request's hand-off parameters
	PhaseHandshake    Phase = "handshake"    // D to P or P to D
	PhaseRegistration Phase = "registration" // sending or matching it
	PhasePrefill      Phase = "prefill"      // P did not finish the prompt
	PhaseTransfer     Phase = "transfer"     // the WRITE or READ
	PhaseWait         Phase = "wait"         // silence of the peer
	PhaseCancel       Phase = "cancel"       // the request was aborted
	PhaseLease        Phase = "lease"        // P's hold ended
	PhaseLimit        Phase = "limit"        // a bound of this engine was reached
)

// Error names the request, peer and phase of a failed hand-off. Reason survives msgpack, so it is
// text; it says what happened, and where possible what to do.
type Error struct {
	Request kv.RequestID
	Peer    kv.EngineID
	Phase   Phase
	Reason  string
}

func (e *Error) Error() string {
	return fmt.Sprintf("KV transfer of request %s with engine %q failed in %s: %s", e.Request, e.Peer, e.Phase, e.Reason)
}
