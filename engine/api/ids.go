package api

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
)

// requestName is the R of a request: the client's X-Request-Id, or 16 hexadecimal digits.
func requestName(header string) (string, error) {
	if header == "" {
		return randomHex(8), nil
	}
	if len(header) > maxRequestID {
		return "", invalid("X-Request-Id", openai.CodeInvalidValue,
			"The header X-Request-Id has %d characters; at most %d are possible.", len(header), maxRequestID)
	}
	for _, c := range []byte(header) {
		if c <= ' ' || c >= 0x7f || c == ',' { // engines join ids with commas
			return "", invalid("X-Request-Id", openai.CodeInvalidValue,
				"The header X-Request-Id has the character %q; printable ASCII without space and comma is possible.", c)
		}
	}
	return header, nil
}

// completionID and chatID are internal ids without `<k>_`.
func (s *Server) completionID(name string, prompt int) kv.RequestID {
	return kv.RequestID("cmpl-" + name + "-" + strconv.Itoa(prompt) + s.suffix())
}

func (s *Server) chatID(name string) kv.RequestID {
	return kv.RequestID("chatcmpl-" + name + s.suffix())
}

func (s *Server) suffix() string {
	if s.cfg.NoRequestIDSuffix {
		return ""
	}
	return "-" + randomHex(4)
}

// childID is the k-th of n answers to one prompt.
func childID(parent kv.RequestID, k, n int) kv.RequestID {
	if n == 1 {
		return parent
	}
	return kv.RequestID(fmt.Sprintf("%d_%s", k, parent))
}

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

func randomSeed() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	var seed uint64
	for _, x := range b {
		seed = seed<<8 | uint64(x)
	}
	return seed
}
