package wire

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"unicode/utf8"

	"github.com/kvferry/kvferry/kv"
)

// ControlCapability is the capability by which a rank announces, in its kvferry extension, that it
// understands control messages. They are sent to no other peer.
const ControlCapability = "control2"

// ClaimCapability is the capability by which a rank announces that it understands Claim, Claimed and
// Failed about a claim. It comes with ControlCapability.
const ClaimCapability = "claim2"

// prefixControl begins every control message. It is no prefix of a request id that this package
// lets through, so that neither can be taken for the other.
const prefixControl = "KVFERRY:"

// Control messages keep two kvferry ranks informed of each other: Beat, Cancel, Claim, ReadDone (D to P),
// States, Claimed, Failed (P to D) and Ack (either way). On the wire each is "KVFERRY:" and a msgpack map whose key
// "kind" says which.
//
// Agent names, engine ids and numbers are public or can be guessed, and whoever reaches an agent may say any
// name. So every message that names a registration or claim brings the Token that its maker gave with it,
// and every Ack the Receipt of its letter: only the two peers have seen them.
//
// Seq numbers the Beats, Cancels, Claims and Faileds of one sender to one receiver, from 1 upwards. A
// message that is sent again keeps its number. States, Claimed and Ack carry the number that they
// answer.

// Sender is D's engine as P reaches it, to answer.
type Sender struct {
	Engine kv.EngineID
	Host   string // of the side channel
	Port   int
	TP     int
}

// Beat is D's sign of life. It renews P's leases on what it names and asks for the state of each
// registration; P answers every Beat with States.
type Beat struct {
	Seq           uint64
	From          Sender
	Names         []kv.RequestID    // requests that are waited for, in any way in which P may know them
	Registrations []RegistrationRef // what P was asked to write
}

// Token is what only the two peers of a registration, claim or letter know: 128 bits that nobody guesses.
type Token [16]byte

// RegistrationRef names one registration or claim of D.
type RegistrationRef struct {
	ID         kv.RequestID // PushReg.RequestID
	Generation kv.Generation
	Token      Token // PushRegExtension.Token; of the claim that this is or is about
}

// RequestState is where a registration stands at P.
type RequestState string

const (
	StateUnknown   RequestState = "unknown"   // P has no such registration
	StateUnmatched RequestState = "unmatched" // P has the registration, and no prefill that it is for
	StateQueued    RequestState = "queued"    // the prefill waits for its turn
	StateRunning   RequestState = "running"   // the prefill is computed
	StateFinished  RequestState = "finished"  // the KV is ready, the WRITE not yet begun
	StateWriting   RequestState = "writing"
	StateSent      RequestState = "sent" // the WRITE has ended well; its completion was delivered with it
)

var requestStates = [...]RequestState{StateUnknown, StateUnmatched, StateQueued, StateRunning, StateFinished, StateWriting, StateSent}

// States answers a Beat, or (Seq 0) acknowledges a registration.
type States struct {
	Seq     uint64 // of the Beat
	Steps   uint64 // of P's engine: while it stays the same nothing is computed; 0 when P does not tell
	Answers []StateAnswer
}

// StateAnswer is the state of one registration.
type StateAnswer struct {
	RegistrationRef
	State RequestState
}

// Cancel says that D does not want a request's KV any more. P gives its blocks back; its Ack says
// that nothing of the registration is written any more. A Generation of 0 is of a request that D
// never registered.
type Cancel struct {
	Seq             uint64
	Receipt         Token
	From            Sender
	RegistrationRef               // without a registration D's id alone
	TransferID      kv.TransferID // "" when the router gave none
	RemoteID        kv.RequestID  // the id by which the router names P's request; "" when it gave none
	Digest          [32]byte      // of the prompt; zero when not told
	Reason          string
}

// Failed says that P will not serve a registration.
type Failed struct {
	Seq     uint64
	Receipt Token
	RegistrationRef
	Phase  string // of P's work: "prefill", "lease", "registration", "transfer", "handshake"
	Reason string // for people; it ends in the client's error message
}

// Ack says that a Cancel or Failed was taken, once or again.
type Ack struct {
	Seq     uint64
	Receipt Token // of the letter
}

// Claim asks P, in pull, for the permission to read the blocks of one finished request. P gives it
// (Claimed) if it holds exactly what D believes: the request, its lease, its prompt, its blocks; else
// it answers Failed, which names the claim. Cancel with the claim's reference ends it early.
type Claim struct {
	Seq             uint64
	From            Sender
	RegistrationRef               // P's request id; the claim's own number, D's
	Lease           kv.Generation // of P's hold; 0 when D was not told
	Tokens          int           // whose KV is in the blocks
	Readers         int           // claims, this one included, that D will make of the request
	Digest          [32]byte      // of the tokens and what else the KV depends on
	Blocks          [32]byte      // BlocksDigest of the blocks that D will read from
}

// Claimed is P's permission.
type Claimed struct {
	Seq uint64 // of the Claim
	RegistrationRef
	Grant [16]byte
}

// ReadDone comes with the end of a READ: the claim by which it was permitted is done with. P gives the
// blocks back when every claim is.
type ReadDone struct {
	RegistrationRef
}

// BlocksDigest is a digest of block lists, so that two engines can compare them.
func BlocksDigest(ids kv.BlockIDs) [32]byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(ids)))
	for _, g := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(g)))
		for _, id := range g {
			b = binary.LittleEndian.AppendUint32(b, uint32(id))
		}
	}
	return sha256.Sum256(b)
}

func (*Beat) notification()     {}
func (*States) notification()   {}
func (*Cancel) notification()   {}
func (*Failed) notification()   {}
func (*Ack) notification()      {}
func (*Claim) notification()    {}
func (*Claimed) notification()  {}
func (*ReadDone) notification() {}

// BoundReason cuts a text to what Cancel and Failed carry: at most MaxReason bytes of UTF-8.
func BoundReason(s string) string {
	if len(s) > MaxReason {
		s = s[:MaxReason]
		for len(s) > 0 && !utf8.RuneStart(s[len(s)-1]) {
			s = s[:len(s)-1]
		}
		if n := len(s); n > 0 && s[n-1] >= utf8.RuneSelf {
			s = s[:n-1] // the first byte of a rune that may be cut
		}
	}
	return string(bytes.ToValidUTF8([]byte(s), []byte("?")))
}
