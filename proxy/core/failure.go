package core

import "fmt"

// Leg is one upstream request of a client request.
type Leg uint8

const (
	Prefill Leg = iota
	Decode
	numLegs
)

func (l Leg) String() string {
	if l == Prefill {
		return "prefill"
	}
	return "decode"
}

// Kind is what went wrong with a leg.
type Kind string

const (
	Connect     Kind = "connect"     // no connection, so nothing was sent
	Stale       Kind = "stale"       // a reused connection died before a byte of the answer
	Broken      Kind = "broken"      // the connection ended inside the exchange
	Timeout     Kind = "timeout"     // silence beyond the bound
	Status      Kind = "status"      // the engine answered with an error
	Garbage     Kind = "garbage"     // the engine's answer is not one
	NoHandoff   Kind = "no_handoff"  // P answered well, but kept no KV
	Coordinates Kind = "coordinates" // P could not say where it is
	Unpaired    Kind = "unpaired"    // P and D cannot work together
	Cancelled   Kind = "cancelled"   // the router ended the leg
	Internal    Kind = "internal"    // a fault of the router
)

// Failure is why a leg ended without its answer.
type Failure struct {
	Leg     Leg
	Engine  string // HTTP address of the engine at fault
	Kind    Kind
	Status  int    // HTTP status for the client
	Message string // what happened, to whom, what to do
	// Body is the engine's own error body, for Status; RetryAfter its header of that name.
	Body       []byte
	RetryAfter string
	// Retry: a new attempt with new ids may do better, and nothing of this one is left behind.
	Retry bool
	// NoKV: the engine is well, but a prompt's KV did not reach it. A D alone can still answer.
	NoKV bool
	// ByClient: the engine is well, and has refused what the client asked for.
	ByClient bool
	// Told: the client has seen this failure already, as an event of D's stream.
	Told bool
}

func (f *Failure) Error() string {
	return fmt.Sprintf("%s leg to %s: %s: %s", f.Leg, f.Engine, f.Kind, f.Message)
}
