package tcp

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/tcp/internal/frame"
)

// Transport is the name of this backend in an agent.Offer.
const Transport = "tcp"

// offer is the blob of an agent.Offer.
//
//	version 1 │ length 1, name │ count 1 │ (length 1, HOST:PORT) …
type offer struct {
	name  agent.Name
	addrs []string
}

func (o offer) encode() []byte {
	b := []byte{frame.Version, byte(len(o.name))}
	b = append(b, o.name...)
	b = append(b, byte(len(o.addrs)))
	for _, a := range o.addrs {
		b = append(b, byte(len(a)))
		b = append(b, a...)
	}
	return b
}

// decodeOffer is strict: nothing may be missing, empty or left over.
func decodeOffer(b []byte) (offer, error) {
	var o offer
	if len(b) == 0 {
		return o, errors.New("offer is empty")
	}
	if b[0] != frame.Version {
		return o, fmt.Errorf("offer has version %d; this agent knows %d", b[0], frame.Version)
	}
	b = b[1:]
	text := func(limit int) (string, error) {
		if len(b) == 0 {
			return "", errors.New("offer is cut short")
		}
		n := int(b[0])
		if n == 0 || n > limit || len(b) < 1+n {
			return "", errors.New("offer is cut short or has an empty part")
		}
		s := string(b[1 : 1+n])
		b = b[1+n:]
		for i := range len(s) {
			if s[i] <= ' ' || s[i] > '~' {
				return "", fmt.Errorf("offer has a character in %q that is not allowed", s)
			}
		}
		return s, nil
	}
	name, err := text(frame.MaxName)
	if err != nil {
		return o, err
	}
	o.name = agent.Name(name)
	if len(b) == 0 || b[0] == 0 || b[0] > maxAddresses {
		return o, fmt.Errorf("offer has not 1 to %d addresses", maxAddresses)
	}
	n := int(b[0])
	b = b[1:]
	for range n {
		a, err := text(255)
		if err != nil {
			return o, err
		}
		o.addrs = append(o.addrs, a)
	}
	if len(b) != 0 {
		return o, fmt.Errorf("offer has %d bytes left over", len(b))
	}
	return o, nil
}
