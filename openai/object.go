package openai

import (
	"bytes"
	"encoding/json"
)

// Object is a JSON object whose fields can be read, set and deleted while every other byte stays as
// its author wrote it: 64-bit numbers, the order of fields, white space and escapes survive. It
// refers to the bytes it was parsed from, which must not change. One goroutine at a time.
type Object struct {
	head   []byte // up to and with the opening brace
	fields []field
	tail   []byte // from the space of an empty object, or the closing brace, on
}

// field is one member as written: the space before the key, key to colon to value, and the space
// behind the value.
type field struct {
	name          string // decoded
	lead, key     []byte // key up to the value, with the colon
	value, behind []byte
}

// ParseObject reads a body that must be one JSON object in valid UTF-8, within MaxDepth and
// MaxFields. Errors are of type *SyntaxError.
func ParseObject(b []byte) (*Object, error) {
	if err := checkUTF8(b); err != nil {
		return nil, err
	}
	s := scanner{b}
	start := s.space(0)
	switch {
	case start == len(b):
		return nil, &SyntaxError{start, "the body is empty"}
	case b[start] != '{':
		return nil, &SyntaxError{start, "the body must be a JSON object"}
	}
	o := &Object{head: b[: start+1 : start+1]}
	at := start + 1 // end of what is accounted for
	end, err := s.object(start, 0, func(m member) error {
		if len(o.fields) == MaxFields {
			return &SyntaxError{m.key, "the body has too many fields"}
		}
		o.fields = append(o.fields, field{
			name: decodeString(b[m.key:m.keyEnd]), lead: b[at:m.key],
			key: b[m.key:m.value], value: b[m.value:m.valueEnd], behind: b[m.valueEnd:m.end],
		})
		at = m.end + 1 // the comma, or the closing brace
		return nil
	})
	if err != nil {
		return nil, err
	}
	if rest := s.space(end); rest != len(b) {
		return nil, &SyntaxError{rest, "there is more text after the JSON object"}
	}
	if len(o.fields) > 0 {
		at--
	}
	o.tail = b[at:]
	return o, nil
}

// Raw is the value of a field as written, without the space around it; nil if the object has no
// such field. Of several the last counts.
func (o *Object) Raw(name string) json.RawMessage {
	for i := len(o.fields) - 1; i >= 0; i-- {
		if o.fields[i].name == name {
			return o.fields[i].value
		}
	}
	return nil
}

// Present is Raw, but nil for a null too.
func (o *Object) Present(name string) json.RawMessage {
	if raw := o.Raw(name); !isNull(raw) {
		return raw
	}
	return nil
}

// Set gives a field a value, which must be valid JSON: in place if the field exists (earlier
// duplicates are removed), else behind the last field.
func (o *Object) Set(name string, value []byte) {
	for i := len(o.fields) - 1; i >= 0; i-- {
		if o.fields[i].name == name {
			o.fields[i].value = value
			o.fields = append(without(o.fields[:i], name), o.fields[i:]...)
			return
		}
	}
	key, err := json.Marshal(name)
	if err != nil { // a string cannot fail to marshal
		panic(err)
	}
	o.fields = append(o.fields, field{name: name, key: append(key, ':'), value: value})
}

// Delete removes every occurrence of a field and says whether there was one.
func (o *Object) Delete(name string) bool {
	n := len(o.fields)
	o.fields = without(o.fields, name)
	return len(o.fields) < n
}

func without(fields []field, name string) []field {
	kept := make([]field, 0, len(fields))
	for _, f := range fields {
		if f.name != name {
			kept = append(kept, f)
		}
	}
	return kept
}

// Clone is a copy that can be edited while the original stays as it is. The text is shared.
func (o *Object) Clone() *Object {
	c := *o
	c.fields = append([]field(nil), o.fields...)
	return &c
}

// Bytes writes the object out, in new memory.
func (o *Object) Bytes() []byte {
	n := len(o.head) + len(o.tail)
	for _, f := range o.fields {
		n += len(f.lead) + len(f.key) + len(f.value) + len(f.behind) + 1
	}
	out := append(make([]byte, 0, n), o.head...)
	for i, f := range o.fields {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, f.lead...)
		out = append(out, f.key...)
		out = append(out, f.value...)
		out = append(out, f.behind...)
	}
	return append(out, o.tail...)
}

// decodeString decodes a JSON string that the scanner has accepted.
func decodeString(raw []byte) string {
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1])
	}
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		panic("openai: an accepted string does not decode: " + err.Error())
	}
	return s
}

func isNull(raw []byte) bool { return len(raw) == 0 || raw[0] == 'n' }
