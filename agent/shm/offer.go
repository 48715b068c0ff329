package shm

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/agent"
)

// Transport is the name of this backend in an agent.Offer.
const Transport = "shm"

const offerVersion = 1

// hostID names a kernel and a network namespace, in which abstract socket names are known.
type hostID [16]byte

// offer is the blob of an agent.Offer: version, host, lengths and bytes of name and socket.
type offer struct {
	host   hostID
	name   agent.Name
	socket string // abstract, without the leading '@'
}

func (o offer) encode() []byte {
	b := append([]byte{offerVersion}, o.host[:]...)
	b = append(b, byte(len(o.name)))
	b = append(b, o.name...)
	b = append(b, byte(len(o.socket)))
	return append(b, o.socket...)
}

func decodeOffer(b []byte) (offer, error) {
	c := cursor{b: b}
	if v := c.u8(); v != offerVersion {
		return offer{}, fmt.Errorf("offer of version %d, this agent understands %d", v, offerVersion)
	}
	var o offer
	copy(o.host[:], c.take(len(o.host)))
	o.name = agent.Name(c.take(int(c.u8())))
	o.socket = string(c.take(int(c.u8())))
	if !c.end() || !validName(o.name) || !validName(agent.Name(o.socket)) || len(o.socket) > 100 {
		return offer{}, errors.New("the offer is malformed")
	}
	return o, nil
}

// validName accepts what can stand in a message and a socket name.
func validName(n agent.Name) bool {
	if len(n) == 0 || len(n) > maxName {
		return false
	}
	for i := range len(n) {
		if n[i] <= ' ' || n[i] > '~' {
			return false
		}
	}
	return true
}

// thisHost is where this process runs.
var thisHost = sync.OnceValues(func() (hostID, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return hostID{}, fmt.Errorf("boot id: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
		return hostID{}, fmt.Errorf("network namespace: %w", err)
	}
	h := sha256.New()
	h.Write(bytes.TrimSpace(boot))
	fmt.Fprintf(h, "/%d/%d", st.Dev, st.Ino)
	return hostID(h.Sum(nil)[:16]), nil
})

// SameHost reports whether an offer of this transport was made on this host, where its socket can
// be reached. A malformed offer is of no host.
func SameHost(o agent.Offer) bool {
	if o.Transport != Transport {
		return false
	}
	theirs, err := decodeOffer(o.Blob)
	if err != nil {
		return false
	}
	ours, err := thisHost()
	return err == nil && theirs.host == ours
}
