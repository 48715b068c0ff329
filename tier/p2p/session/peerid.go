package session

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/kvferry/kvferry/wire"
)

// PeerID is a node's name and where its ROUTER listens: "host:port". An IPv6 host may be in brackets.
type PeerID string

// ParsePeer checks a name that came from a peer or a request: it must be one that can be dialled.
func ParsePeer(s string) (PeerID, error) {
	bad := func(why string) (PeerID, error) {
		if len(s) > 80 {
			s = s[:80] + "…"
		}
		return "", fmt.Errorf("%q is not host:port: %s", s, why)
	}
	host, port, ok := cutLast(s)
	n, err := strconv.ParseUint(port, 10, 16)
	switch {
	case len(s) > 255 || !utf8.ValidString(s):
		return bad("it is too long or no text")
	case !ok:
		return bad("it has no colon")
	case host == "":
		return bad("it has no host")
	case err != nil || n == 0 || strconv.FormatUint(n, 10) != port:
		return bad("the port must be a number from 1 to 65535")
	}
	for _, c := range host {
		if c <= ' ' || c == 0x7f || c == '/' || c == '@' {
			return bad("the host has a character that no host has")
		}
	}
	return PeerID(s), nil
}

func cutLast(s string) (host, port string, ok bool) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return "", "", false
	}
	return s[:i], s[i+1:], true
}

// Split gives what a dialler takes: the host without brackets, and the port.
func (p PeerID) Split() (host, port string) {
	host, port, _ = cutLast(string(p))
	return strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), port
}

// addr is the address that the name spells, if it spells one.
func (p PeerID) addr() (netip.AddrPort, bool) {
	host, port := p.Split()
	a, err := netip.ParseAddr(host)
	n, err2 := strconv.ParseUint(port, 10, 16)
	return netip.AddrPortFrom(a.Unmap(), uint16(n)), err == nil && err2 == nil
}

// checkMemory refuses memory that cannot be addressed.
func checkMemory(m *wire.P2PConnect) error {
	const end = 1 << 63
	switch {
	case m.BaseAddr == 0:
		return fmt.Errorf("its memory has no address")
	case m.NumBlocks < 1 || m.BlockLen < 1:
		return fmt.Errorf("%d blocks of %d bytes", m.NumBlocks, m.BlockLen)
	case m.BlockLen > end/uint64(m.NumBlocks) || m.BaseAddr > end-uint64(m.NumBlocks)*m.BlockLen:
		return fmt.Errorf("%d blocks of %d bytes from %#x do not fit the address space", m.NumBlocks, m.BlockLen, m.BaseAddr)
	}
	return nil
}
