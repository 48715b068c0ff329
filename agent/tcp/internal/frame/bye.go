package frame

import (
	"errors"
	"strings"
)

// AppendBye says why the listener closes the session, or does not open it.
//
//	text …
func AppendBye(dst []byte, text string) []byte {
	at := len(dst)
	return finish(append(begin(dst, KindBye), clip(text)...), at)
}

// DecodeBye decodes the body.
func DecodeBye(b []byte) (string, error) { return decodeText(b) }

func clip(s string) string { return s[:min(len(s), MaxText)] }

// decodeText makes a peer's words fit to be shown.
func decodeText(b []byte) (string, error) {
	if len(b) > MaxText {
		return "", errors.New("text is too long")
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(string(b), "?")), nil
}
