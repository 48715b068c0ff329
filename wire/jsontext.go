package wire

import (
	"unicode/utf16"
	"unicode/utf8"
)

const hexDigits = "0123456789abcdef"

// appendASCIIJSON appends a JSON string as Python's json.dumps does by default: everything outside
// printable ASCII as \uXXXX, in surrogate pairs where needed. A byte that is not UTF-8 becomes the
// lone surrogate that Python keeps for it in file names and arguments.
func appendASCIIJSON(b []byte, s string) []byte {
	b = append(b, '"')
	for i := 0; i < len(s); {
		c, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case c == utf8.RuneError && n == 1:
			b = appendU(b, 0xdc00|rune(s[i]))
		case c < 0x80:
			b = appendASCIIChar(b, byte(c), true)
		case c > 0xffff:
			hi, lo := utf16.EncodeRune(c)
			b = appendU(appendU(b, hi), lo)
		default:
			b = appendU(b, c)
		}
		i += n
	}
	return append(b, '"')
}

// appendJSON appends a JSON string of valid UTF-8 with as few escapes as possible.
func appendJSON(b []byte, s string) []byte {
	b = append(b, '"')
	for i := range len(s) {
		if s[i] < 0x80 {
			b = appendASCIIChar(b, s[i], false)
		} else {
			b = append(b, s[i])
		}
	}
	return append(b, '"')
}

func appendASCIIChar(b []byte, c byte, escapeDEL bool) []byte {
	switch c {
	case '"', '\\':
		return append(b, '\\', c)
	case '\b':
		return append(b, '\\', 'b')
	case '\f':
		return append(b, '\\', 'f')
	case '\n':
		return append(b, '\\', 'n')
	case '\r':
		return append(b, '\\', 'r')
	case '\t':
		return append(b, '\\', 't')
	}
	if c < 0x20 || c == 0x7f && escapeDEL {
		return appendU(b, rune(c))
	}
	return append(b, c)
}

func appendU(b []byte, c rune) []byte {
	return append(b, '\\', 'u', hexDigits[c>>12&15], hexDigits[c>>8&15], hexDigits[c>>4&15], hexDigits[c&15])
}
