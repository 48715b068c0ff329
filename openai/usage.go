package openai

import (
	"bytes"
	"strconv"
	"strings"
)

// CachedTokens reads usage.prompt_tokens_details.cached_tokens of an answer or chunk.
func CachedTokens(o *Object) (int, bool) { return UsageCached(child(o, "usage")) }

// UsageCached reads prompt_tokens_details.cached_tokens of a usage object; nil has none.
func UsageCached(usage *Object) (int, bool) {
	details := child(usage, "prompt_tokens_details")
	if details == nil {
		return 0, false
	}
	n, err := strconv.Atoi(string(details.Present("cached_tokens")))
	return n, err == nil && n >= 0
}

// SetCachedTokens replaces usage.prompt_tokens_details.cached_tokens of an answer or chunk and tells
// whether there was one; nothing else changes.
func SetCachedTokens(o *Object, n int) bool {
	usage := child(o, "usage")
	if !SetUsageCached(usage, n) {
		return false
	}
	o.Set("usage", usage.Bytes())
	return true
}

// SetUsageCached does the same to a usage object.
func SetUsageCached(usage *Object, n int) bool {
	details := child(usage, "prompt_tokens_details")
	if details == nil || details.Raw("cached_tokens") == nil {
		return false
	}
	details.Set("cached_tokens", strconv.AppendInt(nil, int64(n), 10))
	usage.Set("prompt_tokens_details", details.Bytes())
	return true
}

// child is the object in a field; nil if there is none.
func child(o *Object, name string) *Object {
	if o == nil {
		return nil
	}
	raw := o.Present(name)
	if raw == nil || raw[0] != '{' {
		return nil
	}
	c, err := ParseObject(raw)
	if err != nil {
		return nil
	}
	return c
}

// AddUsage adds the counts of one usage object to another: of what was generated, and with prompt also
// of the prompt. A prompt counts once, however many answers it has. The total is made anew.
func AddUsage(dst, src *Object, prompt bool) {
	addCounts(dst, src, func(name string) bool {
		return name != "total_tokens" && (prompt || !strings.HasPrefix(name, "prompt_"))
	})
	p, perr := strconv.Atoi(string(dst.Present("prompt_tokens")))
	c, cerr := strconv.Atoi(string(dst.Present("completion_tokens")))
	if perr == nil && cerr == nil && dst.Raw("total_tokens") != nil {
		dst.Set("total_tokens", strconv.AppendInt(nil, int64(p+c), 10))
	}
}

func addCounts(dst, src *Object, want func(string) bool) {
	for _, f := range src.fields {
		if !want(f.name) || isNull(f.value) {
			continue
		}
		have := dst.Present(f.name)
		if f.value[0] == '{' {
			from, to := child(src, f.name), child(dst, f.name)
			switch {
			case have == nil:
				dst.Set(f.name, f.value)
			case from != nil && to != nil:
				addCounts(to, from, func(string) bool { return true })
				dst.Set(f.name, to.Bytes())
			}
			continue
		}
		n, err := strconv.ParseInt(string(f.value), 10, 64)
		if err != nil {
			continue
		}
		m, err := strconv.ParseInt(string(have), 10, 64)
		if err != nil && have != nil {
			continue
		}
		dst.Set(f.name, strconv.AppendInt(nil, m+n, 10))
	}
}

// Elements lists the values of a JSON list as written, at most most of them; false when raw is no list
// or has more. It refers to raw, which must be valid JSON without space around it.
func Elements(raw []byte, most int) ([][]byte, bool) {
	if len(raw) == 0 || raw[0] != '[' {
		return nil, false
	}
	items, ok := elements(raw, most)
	if !ok {
		return nil, false
	}
	out := make([][]byte, len(items))
	for i, item := range items {
		out[i] = item
	}
	return out, true
}

// JoinElements writes a JSON list.
func JoinElements(items [][]byte) []byte {
	return append(append([]byte{'['}, bytes.Join(items, []byte(","))...), ']')
}
