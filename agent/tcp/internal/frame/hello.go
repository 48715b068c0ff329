package frame

import (
	"errors"
	"fmt"
)

// Session is the dialer's random name of one connection of two agents.
type Session [16]byte

var magic = [8]byte{'k', 'v', 'f', 'e', 'r', 'r', 'y', 0}

const helloFixed = 8 + 2 + 2 + 2 + 16

// Hello is the first frame of every stream.
//
//	magic 8 │ version 2 │ stream 2 │ streams 2 │ session 16 │ name …
type Hello struct {
	Stream  int // 0 = control
	Streams int // data streams of the session, from 1
	Session Session
	Name    string // of the dialing agent
}

// Append encodes.
func (h Hello) Append(dst []byte) []byte {
	at := len(dst)
	dst = append(begin(dst, KindHello), magic[:]...)
	dst = le.AppendUint16(dst, Version)
	dst = le.AppendUint16(dst, uint16(h.Stream))
	dst = le.AppendUint16(dst, uint16(h.Streams))
	dst = append(dst, h.Session[:]...)
	return finish(append(dst, h.Name...), at)
}

// DecodeHello decodes the body.
func DecodeHello(b []byte) (Hello, error) {
	if len(b) <= helloFixed {
		return Hello{}, errShort
	}
	if err := checkMagic(b); err != nil {
		return Hello{}, err
	}
	h := Hello{Stream: int(le.Uint16(b[10:])), Streams: int(le.Uint16(b[12:])), Name: string(b[helloFixed:])}
	copy(h.Session[:], b[14:])
	if h.Streams < 1 || h.Streams > MaxStreams || h.Stream > h.Streams {
		return Hello{}, fmt.Errorf("stream %d of %d; 1 to %d data streams are allowed", h.Stream, h.Streams, MaxStreams)
	}
	return h, checkName(h.Name)
}

// checkMagic checks the first ten bytes of a body.
func checkMagic(b []byte) error {
	if [8]byte(b[:8]) != magic {
		return errors.New("not a kvferry agent")
	}
	if v := le.Uint16(b[8:]); v != Version {
		return fmt.Errorf("speaks version %d of the transport; this agent speaks %d", v, Version)
	}
	return nil
}

// checkName accepts printable ASCII, so that names can be shown.
func checkName(s string) error {
	if len(s) == 0 || len(s) > MaxName {
		return fmt.Errorf("name of %d bytes", len(s))
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return fmt.Errorf("name %q has a character that is not allowed", s)
		}
	}
	return nil
}
