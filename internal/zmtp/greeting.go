package zmtp

import (
	"bytes"
	"encoding/binary"
)

// The greeting, 64 bytes, is the first thing that each side sends (ZMTP 3.1, "greeting"):
//
//	signature 10 | version major, minor | mechanism 20 | as-server 1 | filler 31
const (
	signatureBytes = 10
	greetingBytes  = 64
	mechanismBytes = 20
	versionMajor   = 3
	versionMinor   = 1
)

// greeting is what a peer's greeting says. The filler and as-server (which NULL does not use) are skipped.
type greeting struct {
	major, minor byte
}

// appendGreeting appends our greeting. The eight padding bytes of the signature hold the length of the
// identity plus one, as libzmq sends them for peers of ZMTP 1.
func appendGreeting(dst []byte, identity string) []byte {
	dst = append(dst, 0xff)
	dst = binary.BigEndian.AppendUint64(dst, uint64(len(identity))+1)
	dst = append(dst, 0x7f, versionMajor, versionMinor)
	dst = append(dst, "NULL"...)
	return append(dst, make([]byte, greetingBytes-signatureBytes-2-len("NULL"))...)
}

// checkSignature tells after ten bytes whether the other side speaks ZMTP 2 or later at all.
func checkSignature(b [signatureBytes]byte) error {
	if b[0] != 0xff || b[9]&1 != 1 {
		return protocolf("the first bytes %q are not a ZMTP greeting", b[:])
	}
	return nil
}

// parseGreeting reads a whole greeting.
func parseGreeting(b [greetingBytes]byte) (greeting, error) {
	if err := checkSignature([signatureBytes]byte(b[:signatureBytes])); err != nil {
		return greeting{}, err
	}
	g := greeting{major: b[10], minor: b[11]}
	if g.major < versionMajor {
		return g, protocolf("peer speaks ZMTP %d.%d, at least 3.0 is needed", g.major, g.minor)
	}
	mechanism := b[12 : 12+mechanismBytes]
	name, pad, _ := bytes.Cut(mechanism, []byte{0})
	if string(name) != "NULL" || len(bytes.Trim(pad, "\x00")) != 0 {
		return g, protocolf("peer asks for mechanism %q, only NULL is spoken here", bytes.TrimRight(mechanism, "\x00"))
	}
	return g, nil
}
