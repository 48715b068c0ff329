package openai

import (
	"fmt"
	"unicode/utf8"
)

// SyntaxError is a body that is not JSON, or that is beyond the limits of this package.
type SyntaxError struct {
	Offset int // bytes before the fault
	Reason string
}

func (e *SyntaxError) Error() string { return fmt.Sprintf("%s at byte %d", e.Reason, e.Offset) }

// scanner walks JSON text by the grammar of RFC 8259 and decodes nothing. Each method takes an
// offset and returns the first one behind what it read.
type scanner struct{ b []byte }

func (s scanner) fail(at int, reason string) (int, error) {
	if at >= len(s.b) {
		return 0, &SyntaxError{len(s.b), "unexpected end of JSON"}
	}
	return 0, &SyntaxError{at, reason}
}

func (s scanner) space(i int) int {
	for i < len(s.b) && (s.b[i] == ' ' || s.b[i] == '\n' || s.b[i] == '\t' || s.b[i] == '\r') {
		i++
	}
	return i
}

// value reads one value that begins at i, inside depth containers.
func (s scanner) value(i, depth int) (int, error) {
	if i >= len(s.b) {
		return s.fail(i, "")
	}
	switch c := s.b[i]; {
	case c == '"':
		return s.str(i)
	case c == '{':
		return s.object(i, depth, nil)
	case c == '[':
		return s.array(i, depth, nil)
	case c == 't':
		return s.literal(i, "true")
	case c == 'f':
		return s.literal(i, "false")
	case c == 'n':
		return s.literal(i, "null")
	case c == '-' || '0' <= c && c <= '9':
		return s.number(i)
	}
	return s.fail(i, "a JSON value should begin here, but does not")
}

func (s scanner) literal(i int, word string) (int, error) {
	for j := range len(word) {
		if i+j >= len(s.b) || s.b[i+j] != word[j] {
			return s.fail(i+j, "invalid literal, expected "+word)
		}
	}
	return i + len(word), nil
}

func (s scanner) digits(i int) (int, error) {
	if i >= len(s.b) || s.b[i] < '0' || s.b[i] > '9' {
		return s.fail(i, "a digit is missing in a number")
	}
	for i < len(s.b) && '0' <= s.b[i] && s.b[i] <= '9' {
		i++
	}
	return i, nil
}

func (s scanner) number(i int) (int, error) {
	var err error
	if s.b[i] == '-' {
		i++
	}
	if i < len(s.b) && s.b[i] == '0' {
		i++
	} else if i, err = s.digits(i); err != nil {
		return 0, err
	}
	if i < len(s.b) && s.b[i] == '.' {
		if i, err = s.digits(i + 1); err != nil {
			return 0, err
		}
	}
	if i < len(s.b) && (s.b[i] == 'e' || s.b[i] == 'E') {
		i++
		if i < len(s.b) && (s.b[i] == '+' || s.b[i] == '-') {
			i++
		}
		if i, err = s.digits(i); err != nil {
			return 0, err
		}
	}
	return i, nil
}

func (s scanner) str(i int) (int, error) {
	for i++; i < len(s.b); i++ {
		switch c := s.b[i]; {
		case c == '"':
			return i + 1, nil
		case c < 0x20:
			return s.fail(i, "a control character in a string must be escaped")
		case c == '\\':
			end, err := s.escape(i)
			if err != nil {
				return 0, err
			}
			i = end - 1
		}
	}
	return s.fail(i, "")
}

func (s scanner) escape(i int) (int, error) {
	i++
	if i >= len(s.b) {
		return s.fail(i, "")
	}
	switch s.b[i] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return i + 1, nil
	case 'u':
		for j := i + 1; j <= i+4; j++ {
			if j >= len(s.b) || !isHex(s.b[j]) {
				return s.fail(j, "\\u needs four hexadecimal digits")
			}
		}
		return i + 5, nil
	}
	return s.fail(i, "unknown escape in a string")
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

// member is where one field of an object lies: key and value without the space around them, and
// the end of the space behind the value.
type member struct{ key, keyEnd, value, valueEnd, end int }

// object reads an object and shows its members to f when f is not nil.
func (s scanner) object(i, depth int, f func(member) error) (int, error) {
	if depth >= MaxDepth {
		return s.fail(i, fmt.Sprintf("JSON nests deeper than %d", MaxDepth))
	}
	i = s.space(i + 1)
	if i < len(s.b) && s.b[i] == '}' {
		return i + 1, nil
	}
	for {
		m := member{key: i}
		if i >= len(s.b) || s.b[i] != '"' {
			return s.fail(i, "a field name in quotes is missing")
		}
		var err error
		if m.keyEnd, err = s.str(i); err != nil {
			return 0, err
		}
		if i = s.space(m.keyEnd); i >= len(s.b) || s.b[i] != ':' {
			return s.fail(i, "a colon is missing after a field name")
		}
		m.value = s.space(i + 1)
		if m.valueEnd, err = s.value(m.value, depth+1); err != nil {
			return 0, err
		}
		i = s.space(m.valueEnd)
		m.end = i
		if f != nil {
			if err := f(m); err != nil {
				return 0, err
			}
		}
		if i < len(s.b) && s.b[i] == '}' {
			return i + 1, nil
		}
		if i >= len(s.b) || s.b[i] != ',' {
			return s.fail(i, "a comma or } is missing after a field")
		}
		i = s.space(i + 1)
	}
}

// array reads a list and shows the bounds of its elements to f when f is not nil.
func (s scanner) array(i, depth int, f func(from, to int) error) (int, error) {
	if depth >= MaxDepth {
		return s.fail(i, fmt.Sprintf("JSON nests deeper than %d", MaxDepth))
	}
	i = s.space(i + 1)
	if i < len(s.b) && s.b[i] == ']' {
		return i + 1, nil
	}
	for {
		end, err := s.value(i, depth+1)
		if err != nil {
			return 0, err
		}
		if f != nil {
			if err := f(i, end); err != nil {
				return 0, err
			}
		}
		i = s.space(end)
		if i < len(s.b) && s.b[i] == ']' {
			return i + 1, nil
		}
		if i >= len(s.b) || s.b[i] != ',' {
			return s.fail(i, "a comma or ] is missing after a list element")
		}
		i = s.space(i + 1)
	}
}

// checkUTF8 finds the first byte that is not UTF-8: such a body is not JSON, and engines differ in
// what they make of it.
func checkUTF8(b []byte) error {
	if utf8.Valid(b) {
		return nil
	}
	for i := 0; ; {
		r, n := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && n <= 1 {
			return &SyntaxError{i, "the body is not valid UTF-8"}
		}
		i += n
	}
}
