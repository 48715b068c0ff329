package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/kvferry/kvferry/kv"
)

// parser reads typed fields out of an Object and keeps the first error. One goroutine.
type parser struct {
	obj    *Object
	prefix string // of names in errors: "" or "stream_options."
	err    error  // an *Error
}

func newParser(body []byte) (*parser, error) {
	obj, err := ParseObject(body)
	if err != nil {
		return nil, JSONError(err)
	}
	return &parser{obj: obj}, nil
}

// JSONError gives an error of ParseObject the API's shape: status 400.
func JSONError(err error) *Error {
	var syntax *SyntaxError
	if errors.As(err, &syntax) {
		return badRequest("", CodeInvalidJSON, "The request body is not usable JSON: %s.", syntax)
	}
	return &Error{Status: statusBadRequest, Type: TypeInvalidRequest, Code: CodeInvalidJSON, Message: err.Error()}
}

func (p *parser) fail(err error) {
	var e *Error
	if p.err == nil && errors.As(err, &e) && e != nil {
		p.err = e
	}
}

// inner is a parser of an object in a field; its error is the caller's to take over.
func (p *parser) inner(name string, raw []byte) *parser {
	obj, err := ParseObject(raw)
	if err != nil { // the scanner has accepted it, so only MaxFields is left
		p.fail(badRequest(p.prefix+name, CodeInvalidJSON, "%s: %s.", p.prefix+name, err))
		obj = &Object{}
	}
	return &parser{obj: obj, prefix: p.prefix + name + "."}
}

func (p *parser) str(name string) string {
	raw := p.obj.Present(name)
	if raw == nil {
		return ""
	}
	if raw[0] != '"' {
		p.fail(wrongType(p.prefix+name, "a string", raw))
		return ""
	}
	return decodeString(raw)
}

func (p *parser) boolean(name string) bool {
	raw := p.obj.Present(name)
	if raw == nil {
		return false
	}
	if raw[0] != 't' && raw[0] != 'f' {
		p.fail(wrongType(p.prefix+name, "true or false", raw))
	}
	return raw[0] == 't'
}

// integer reads a whole number in [low, high]; absent gives otherwise. 1.0 and 1e3 are no integers.
func (p *parser) integer(name string, otherwise, low, high int64) int64 {
	raw := p.obj.Present(name)
	if raw == nil {
		return otherwise
	}
	n, err := parseInt(p.prefix+name, raw, low, high)
	if err != nil {
		p.fail(err)
		return otherwise
	}
	return n
}

func parseInt(name string, raw []byte, low, high int64) (int64, error) {
	if !isNumber(raw) {
		return 0, wrongType(name, "an integer", raw)
	}
	n, err := strconv.ParseInt(string(raw), 10, 64)
	switch {
	case errors.Is(err, strconv.ErrSyntax):
		return 0, wrongType(name, "an integer", raw)
	case err == nil && n < low:
		return 0, wrongValue(name, "is %d; it must be at least %d.", n, low)
	case err != nil && raw[0] == '-':
		return 0, wrongValue(name, "is %s; it must be at least %d.", clip(raw), low)
	case err != nil || n > high:
		return 0, wrongValue(name, "is %s; it must be at most %d.", clip(raw), high)
	}
	return n, nil
}

func isNumber(raw []byte) bool { return raw[0] == '-' || '0' <= raw[0] && raw[0] <= '9' }

// number reads a finite number; absent gives otherwise.
func (p *parser) number(name string, otherwise float64) float64 {
	raw := p.obj.Present(name)
	if raw == nil {
		return otherwise
	}
	if !isNumber(raw) {
		p.fail(wrongType(p.prefix+name, "a number", raw))
		return otherwise
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || math.IsInf(f, 0) {
		p.fail(wrongValue(p.prefix+name, "is %s; that is outside every possible range.", clip(raw)))
		return otherwise
	}
	return f
}

// elements lists the values of a list that the scanner has accepted.
func elements(raw []byte, most int) (out []json.RawMessage, ok bool) {
	errMany := errors.New("too many")
	_, err := scanner{raw}.array(0, 0, func(from, to int) error {
		if len(out) == most {
			return errMany
		}
		out = append(out, raw[from:to])
		return nil
	})
	return out, err == nil
}

func (p *parser) stop(name string) []string {
	raw := p.obj.Present(name)
	if raw == nil {
		return nil
	}
	items := []json.RawMessage{raw}
	if raw[0] == '[' {
		var ok bool
		if items, ok = elements(raw, MaxStops); !ok {
			p.fail(wrongValue(name, "has more than %d strings.", MaxStops))
			return nil
		}
	}
	stops := make([]string, 0, len(items))
	for i, item := range items {
		at := name
		if raw[0] == '[' {
			at = fmt.Sprintf("%s[%d]", name, i)
		}
		if item[0] != '"' {
			p.fail(wrongType(at, "a string", item))
			return nil
		}
		s := decodeString(item)
		if s == "" || len(s) > MaxStopBytes {
			p.fail(wrongValue(at, "has %d bytes; it must have 1 to %d.", len(s), MaxStopBytes))
			return nil
		}
		stops = append(stops, s)
	}
	return stops
}

// prompts reads "text", [1,2,3], ["text", …] or [[1,2,3], …].
func (p *parser) prompts(name string) []Prompt {
	raw := p.obj.Present(name)
	switch {
	case raw == nil:
		p.fail(badRequest(name, CodeMissing, "%s is missing.", name))
		return nil
	case raw[0] == '"':
		return p.prompt(nil, name, raw)
	case raw[0] != '[':
		p.fail(wrongType(name, "a string, a list of token ids, or a list of these", raw))
		return nil
	}
	first := raw[scanner{raw}.space(1):]
	switch {
	case first[0] == ']':
		p.fail(wrongValue(name, "is an empty list; it needs at least one token or one prompt."))
		return nil
	case isNumber(first):
		return p.prompt(nil, name, raw)
	}
	items, ok := elements(raw, MaxPrompts)
	if !ok {
		p.fail(wrongValue(name, "has more than %d prompts.", MaxPrompts))
		return nil
	}
	var out []Prompt
	for i, item := range items {
		at := fmt.Sprintf("%s[%d]", name, i)
		if item[0] != first[0] || item[0] != '"' && item[0] != '[' {
			p.fail(wrongType(at, "a string or a list of token ids like the prompts before it", item))
			return nil
		}
		if out = p.prompt(out, at, item); p.err != nil {
			return nil
		}
	}
	return out
}

// prompt appends one prompt: a string or a list of token ids.
func (p *parser) prompt(out []Prompt, at string, raw []byte) []Prompt {
	if raw[0] == '"' {
		text := decodeString(raw)
		if text == "" {
			p.fail(wrongValue(at, "is an empty string; a prompt needs at least one token."))
		}
		return append(out, Prompt{Text: text})
	}
	tokens, err := tokenIDs(at, raw)
	if err != nil {
		p.fail(err)
	} else if len(tokens) == 0 {
		p.fail(wrongValue(at, "is an empty list; a prompt needs at least one token."))
	}
	return append(out, Prompt{Tokens: tokens})
}

func (p *parser) stopTokens(name string) []kv.Token {
	raw := p.obj.Present(name)
	if raw == nil {
		return nil
	}
	if raw[0] != '[' {
		p.fail(wrongType(name, "a list of token ids", raw))
		return nil
	}
	tokens, err := tokenIDs(name, raw)
	if err != nil {
		p.fail(err)
	}
	if len(tokens) > MaxStopTokens {
		p.fail(wrongValue(name, "has %d tokens; it may have %d.", len(tokens), MaxStopTokens))
	}
	return tokens
}

// tokenIDs reads a list of numbers that the scanner has accepted.
func tokenIDs(at string, raw []byte) (tokens []kv.Token, err error) {
	_, err = scanner{raw}.array(0, 0, func(from, to int) error {
		n, err := strconv.ParseInt(string(raw[from:to]), 10, 32)
		if err != nil || n < 0 { // once more, for the error: a name per token would cost too much
			if n, err = parseInt(fmt.Sprintf("%s[%d]", at, len(tokens)), raw[from:to], 0, math.MaxInt32); err != nil {
				return err
			}
		}
		tokens = append(tokens, kv.Token(n))
		return nil
	})
	return tokens, err
}
