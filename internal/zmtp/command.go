package zmtp

import (
	"encoding/binary"
	"slices"
	"strings"
	"time"
)

// Names of the commands that mean something here. Others are ignored, as ZMTP 3.1 asks.
const (
	commandReady = "READY"
	commandError = "ERROR"
	commandPing  = "PING"
	commandPong  = "PONG"
)

// Names of READY's properties; a receiver compares them without regard to case.
const (
	propSocketType = "Socket-Type"
	propIdentity   = "Identity"
)

type socketType string

const (
	typeReq    socketType = "REQ"
	typeRep    socketType = "REP"
	typeRouter socketType = "ROUTER"
	typeDealer socketType = "DEALER"
)

// mates lists which peers each of our socket types may talk to (ZMTP 3.1, "The Socket-Type property").
var mates = map[socketType][]socketType{
	typeReq:    {typeRep, typeRouter},
	typeRouter: {typeReq, typeDealer, typeRouter},
	typeDealer: {typeRep, typeDealer, typeRouter},
}

// command is a command frame's body, split. data aliases the body.
type command struct {
	name string
	data []byte
}

func parseCommand(body []byte) (command, error) {
	if len(body) == 0 || body[0] == 0 || int(body[0]) > len(body)-1 {
		return command{}, protocolf("a command frame of %d bytes has no valid name", len(body))
	}
	n := 1 + int(body[0])
	return command{name: string(body[1:n]), data: body[n:]}, nil
}

// appendCommand appends a whole command frame.
func appendCommand(dst []byte, name string, data []byte) []byte {
	dst = appendFrameHeader(dst, flagCommand, 1+len(name)+len(data))
	dst = append(dst, byte(len(name)))
	dst = append(dst, name...)
	return append(dst, data...)
}

// ready is what a READY command tells.
type ready struct {
	socketType socketType
	identity   string
}

// appendReady appends a READY frame, its properties in libzmq's order.
func appendReady(dst []byte, r ready) []byte {
	var data []byte
	for _, p := range [][2]string{{propSocketType, string(r.socketType)}, {propIdentity, r.identity}} {
		data = append(data, byte(len(p[0])))
		data = append(data, p[0]...)
		data = binary.BigEndian.AppendUint32(data, uint32(len(p[1])))
		data = append(data, p[1]...)
	}
	return appendCommand(dst, commandReady, data)
}

// parseReady reads READY's properties. Unknown properties are skipped, repeated ones refused.
func parseReady(data []byte) (ready, error) {
	var r ready
	var seen []string
	for len(data) > 0 {
		name, value, rest, err := cutProperty(data)
		if err != nil {
			return r, err
		}
		data = rest
		if slices.Contains(seen, name) {
			return r, protocolf("READY repeats property %q", name)
		}
		if seen = append(seen, name); len(seen) > maxReadyProps {
			return r, limitf("READY of more than %d properties", maxReadyProps)
		}
		switch name {
		case strings.ToLower(propSocketType):
			r.socketType = socketType(value)
		case strings.ToLower(propIdentity):
			r.identity = string(value)
			if err := validIdentity(r.identity); err != nil {
				return r, protocolf("%v", err)
			}
		}
	}
	if r.socketType == "" {
		return r, protocolf("READY without a socket type")
	}
	return r, nil
}

// cutProperty takes one property off data; the name comes in lower case.
func cutProperty(data []byte) (name string, value, rest []byte, err error) {
	n := int(data[0])
	if n == 0 || len(data) < 1+n+4 {
		return "", nil, nil, protocolf("READY has a truncated property name")
	}
	name = strings.ToLower(string(data[1 : 1+n]))
	size := binary.BigEndian.Uint32(data[1+n:])
	data = data[1+n+4:]
	if uint64(size) > uint64(len(data)) {
		return "", nil, nil, protocolf("READY property %q announces %d bytes, %d are left", name, size, len(data))
	}
	return name, data[:size], data[size:], nil
}

// checkMate says whether we may talk to a peer of that type.
func checkMate(ours, theirs socketType) error {
	if !slices.Contains(mates[ours], theirs) {
		return protocolf("a %s socket cannot talk to a %.20q socket", ours, theirs)
	}
	return nil
}

// parsePing returns the TTL (0 for none) and the context to echo, a copy of at most 16 bytes.
func parsePing(data []byte) (ttl time.Duration, context []byte, err error) {
	if len(data) < 2 {
		return 0, nil, protocolf("PING of %d bytes, at least 2 are needed", len(data))
	}
	ttl = time.Duration(binary.BigEndian.Uint16(data)) * heartbeatTTLGrain
	return ttl, slices.Clone(data[2:min(len(data), 2+maxPingContext)]), nil
}

// appendPing appends a PING frame without context. The TTL is rounded up to tenths of a second.
func appendPing(dst []byte, ttl time.Duration) []byte {
	tenths := (ttl + heartbeatTTLGrain - 1) / heartbeatTTLGrain
	return appendCommand(dst, commandPing, binary.BigEndian.AppendUint16(nil, uint16(tenths)))
}

// appendError appends an ERROR frame, cutting the reason at what its length byte can say.
func appendError(dst []byte, reason string) []byte {
	reason = reason[:min(len(reason), maxErrorReason)]
	return appendCommand(dst, commandError, append([]byte{byte(len(reason))}, reason...))
}

// parseError returns the reason of an ERROR command.
func parseError(data []byte) (string, error) {
	if len(data) == 0 || int(data[0]) > len(data)-1 {
		return "", protocolf("ERROR command without a valid reason")
	}
	return string(data[1 : 1+int(data[0])]), nil
}
