package openai

import (
	"fmt"
	"strings"
)

func (p *parser) messages(name string) []Message {
	raw := p.obj.Present(name)
	if raw == nil {
		p.fail(badRequest(name, CodeMissing, "%s is missing.", name))
		return nil
	}
	if raw[0] != '[' {
		p.fail(wrongType(name, "a list of messages", raw))
		return nil
	}
	items, ok := elements(raw, MaxMessages)
	if !ok {
		p.fail(wrongValue(name, "has more than %d messages.", MaxMessages))
		return nil
	}
	if len(items) == 0 {
		p.fail(wrongValue(name, "is an empty list; it needs at least one message."))
		return nil
	}
	out := make([]Message, 0, len(items))
	for i, item := range items {
		m := p.message(fmt.Sprintf("%s[%d]", name, i), item)
		if p.err != nil {
			return nil
		}
		out = append(out, m)
	}
	return out
}

func (p *parser) message(at string, raw []byte) Message {
	if raw[0] != '{' {
		p.fail(wrongType(at, "an object", raw))
		return Message{}
	}
	in := p.inner(at, raw)
	m := Message{Role: in.str("role")}
	switch m.Role {
	case "system", "developer", "user", "assistant":
	case "":
		in.fail(badRequest(at+".role", CodeMissing, "%s.role is missing.", at))
	default:
		in.fail(badRequest(at+".role", CodeUnsupported,
			"%s.role is %q; supported are system, developer, user and assistant.", at, clip([]byte(m.Role))))
	}
	for _, f := range []string{"tool_calls", "function_call", "audio"} {
		if v := in.obj.Present(f); v != nil && string(v) != "[]" {
			in.fail(badRequest(at+"."+f, CodeUnsupported, "%s.%s is not supported here.", at, f))
		}
	}
	m.Content = in.content(at + ".content")
	p.fail(in.err)
	return m
}

// content reads a string, or a list of text parts, which become lines as in stock engines.
func (p *parser) content(at string) string {
	raw := p.obj.Present("content")
	switch {
	case raw == nil:
		p.fail(badRequest(at, CodeMissing, "%s is missing.", at))
		return ""
	case raw[0] == '"':
		return decodeString(raw)
	case raw[0] != '[':
		p.fail(wrongType(at, "a string or a list of text parts", raw))
		return ""
	}
	items, ok := elements(raw, MaxMessages)
	if !ok {
		p.fail(wrongValue(at, "has more than %d parts.", MaxMessages))
		return ""
	}
	var b strings.Builder
	for i, item := range items {
		part := fmt.Sprintf("%s[%d]", at, i)
		if item[0] != '{' {
			p.fail(wrongType(part, "an object", item))
			return ""
		}
		in := &parser{prefix: part + "."}
		var err error
		if in.obj, err = ParseObject(item); err != nil {
			p.fail(badRequest(part, CodeInvalidJSON, "%s: %s.", part, err))
			return ""
		}
		if kind := in.str("type"); in.err == nil && kind != "text" {
			in.fail(badRequest(part+".type", CodeUnsupported, "%s.type is %q; only text is supported.", part, clip([]byte(kind))))
		}
		if in.err == nil && in.obj.Present("text") == nil {
			in.fail(badRequest(part+".text", CodeMissing, "%s.text is missing.", part))
		}
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(in.str("text"))
		if in.err != nil {
			p.fail(in.err)
			return ""
		}
	}
	return b.String()
}
