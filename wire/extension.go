package wire

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// ExtensionVersion is the version of Extension that this package writes.
const ExtensionVersion = 1

// Extension is what a kvferry rank adds to its metadata under the key "kvferry", which stock peers
// ignore. Its absence marks a stock peer: nothing that release 0.32.0 does not define is sent there.
type Extension struct {
	Version      int          // of this map, >= 1; later versions only add keys
	Instance     string       // random per process start: tells a restarted engine from the old one
	HostID       string       // equal on ranks that share a kernel and can share memory; "" unknown
	Agents       []AgentOffer // by ascending transport, each transport once
	Capabilities []string     // names of what else this rank understands, such as "push_fail"
	// Session and Answers are of the P2P tier's connect: the sender's number for its session, from 1, and the
	// peer's for that whose connect this one answers; 0: none.
	Session, Answers uint64
}

// AgentOffer is one way to reach a rank: the metadata of its agent for one transport.
type AgentOffer struct {
	Transport string // "shm", "tcp", …
	Blob      []byte // what that agent's AddPeer takes; never nil after decoding
}

// Has reports whether the rank announces the capability. A nil Extension has none.
func (e *Extension) Has(capability string) bool {
	return e != nil && slices.Contains(e.Capabilities, capability)
}

// Validate reports an extension that a peer would refuse.
func (e *Extension) Validate() error {
	bad := func(field string, kind error, format string, args ...any) error {
		return &DecodeError{Message: "agent metadata", Field: extensionKey + "." + field, Offset: -1,
			Reason: fmt.Sprintf(format, args...), Kind: kind}
	}
	if e.Version < 1 {
		return bad("version", ErrRange, "%d is below 1", e.Version)
	}
	if reason, kind := badText(e.Instance, MaxName, false); reason != "" {
		return bad("instance", kind, "%s", reason)
	}
	if reason, kind := badText(e.HostID, MaxName, true); reason != "" {
		return bad("host_id", kind, "%s", reason)
	}
	if len(e.Agents) > MaxAgents {
		return bad("agents", ErrLimit, "has %d entries, more than %d", len(e.Agents), MaxAgents)
	}
	for i, a := range e.Agents {
		if reason, kind := badText(a.Transport, MaxName, false); reason != "" {
			return bad("agents", kind, "transport %s", reason)
		}
		if len(a.Blob) > MaxAgentBlob {
			return bad("agents", ErrLimit, "%s has %d bytes, more than %d", a.Transport, len(a.Blob), MaxAgentBlob)
		}
		for _, b := range e.Agents[:i] {
			if a.Transport == b.Transport {
				return bad("agents", ErrRange, "%s comes twice", a.Transport)
			}
		}
	}
	if len(e.Capabilities) > MaxCapabilities {
		return bad("capabilities", ErrLimit, "has %d entries, more than %d", len(e.Capabilities), MaxCapabilities)
	}
	for _, c := range e.Capabilities {
		if reason, kind := badText(c, MaxName, false); reason != "" {
			return bad("capabilities", kind, "name %s", reason)
		}
	}
	return nil
}

// append appends a valid extension.
func (e *Extension) append(b []byte) []byte {
	agents := slices.Clone(e.Agents)
	slices.SortFunc(agents, byTransport)
	n := 5
	for _, x := range []uint64{e.Session, e.Answers} {
		if x != 0 {
			n++
		}
	}
	b = msgp.AppendMapHeader(b, uint32(n))
	b = msgp.AppendString(b, "version")
	b = appendInt(b, e.Version)
	b = msgp.AppendString(b, "instance")
	b = msgp.AppendString(b, e.Instance)
	b = msgp.AppendString(b, "host_id")
	b = msgp.AppendString(b, e.HostID)
	b = msgp.AppendString(b, "agents")
	b = msgp.AppendMapHeader(b, uint32(len(agents)))
	for _, a := range agents {
		b = msgp.AppendString(b, a.Transport)
		b = msgp.AppendBytes(b, a.Blob)
	}
	b = msgp.AppendString(b, "capabilities")
	b = appendStrs(b, e.Capabilities)
	if e.Session != 0 {
		b = msgp.AppendString(b, "session")
		b = msgp.AppendUint64(b, e.Session)
	}
	if e.Answers != 0 {
		b = msgp.AppendString(b, "answers")
		b = msgp.AppendUint64(b, e.Answers)
	}
	return b
}

func byTransport(a, b AgentOffer) int { return cmp.Compare(a.Transport, b.Transport) }

// extension reads the map. version and instance must be there; a later version's keys are skipped.
func (r *reader) extension() *Extension {
	e := new(Extension)
	var seen keySet
	for range r.mapLen() {
		switch key := r.extensionKey(); string(key) {
		case "version":
			e.Version = r.intIn(1, MaxTokens)
			seen.add(0)
		case "instance":
			e.Instance = r.str(MaxName)
			seen.add(1)
		case "host_id":
			e.HostID = r.str(MaxName)
		case "agents":
			e.Agents = r.agentOffers()
		case "capabilities":
			if e.Capabilities = r.strs(MaxCapabilities, MaxName); len(e.Capabilities) == 0 {
				e.Capabilities = nil
			}
		case "session":
			e.Session = r.uint()
		case "answers":
			e.Answers = r.uint()
		default:
			r.skip()
		}
		if r.err != nil {
			return nil
		}
	}
	r.require(seen, "kvferry.version", "kvferry.instance")
	if r.err == nil {
		if err, ok := e.Validate().(*DecodeError); ok {
			r.err = err
		}
	}
	return e
}

func (r *reader) agentOffers() []AgentOffer {
	n := r.mapLen()
	if n > MaxAgents {
		r.fail(ErrLimit, "has %d entries, more than %d", n, MaxAgents)
	}
	if n == 0 || r.err != nil {
		return nil
	}
	out := make([]AgentOffer, 0, n)
	for i := 0; i < n && r.err == nil; i++ {
		r.elem = i
		transport := r.str(MaxName)
		out = append(out, AgentOffer{Transport: transport, Blob: r.bin(MaxAgentBlob)})
	}
	slices.SortFunc(out, byTransport)
	return out
}
