package model

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// fields reads the members of one JSON object of a file. The first failure stays in err, and every
// later read gives a zero value, so that a reader checks once at its end.
type fields struct {
	file    string
	path    string // of the object in the file, with a final dot; empty for the whole
	members map[string]json.RawMessage
	err     error
}

func parseFields(file, path string, data []byte) *fields {
	f := &fields{file: file, path: path}
	if err := json.Unmarshal(data, &f.members); err != nil {
		f.fail("", "is no JSON object: "+err.Error())
	} else if f.members == nil {
		f.fail("", "is null instead of an object")
	}
	return f
}

func (f *fields) fail(name, reason string) {
	if f.err == nil {
		f.err = &FormatError{File: f.file, Where: f.path + name, Reason: reason}
	}
}

func (f *fields) unsupported(name string, need string) {
	if f.err != nil {
		return
	}
	var value bytes.Buffer
	if json.Compact(&value, f.members[name]) != nil {
		value.WriteString("set") // not reached: members were parsed
	}
	f.err = &UnsupportedError{File: f.file, Field: f.path + name, Value: short(value.Bytes()), Need: need}
}

// has reports whether a member is there and not null.
func (f *fields) has(name string) bool {
	raw := bytes.TrimSpace(f.members[name])
	return len(raw) > 0 && !bytes.Equal(raw, []byte("null"))
}

// read decodes a member if it is there and not null.
func (f *fields) read(name string, into any) bool {
	if f.err != nil || !f.has(name) {
		return false
	}
	if err := json.Unmarshal(f.members[name], into); err != nil {
		f.fail(name, fmt.Sprintf("cannot be read from %s", short(f.members[name])))
		return false
	}
	return true
}

func (f *fields) need(name string, into any) {
	if f.err == nil && !f.has(name) {
		f.fail(name, "is missing")
	}
	f.read(name, into)
}

// object is a member that is an object.
func (f *fields) object(name string) *fields {
	var raw json.RawMessage
	f.need(name, &raw)
	if f.err != nil {
		return &fields{file: f.file, path: f.path + name + ".", err: f.err}
	}
	return parseFields(f.file, f.path+name+".", raw)
}

// only demands that a member, if there, has one of the given JSON texts or is null.
func (f *fields) only(name string, texts ...string) {
	if !f.has(name) {
		return
	}
	for _, t := range texts {
		if string(bytes.TrimSpace(f.members[name])) == t {
			return
		}
	}
	need := "null"
	for _, t := range texts {
		need += " or " + t
	}
	f.unsupported(name, need)
}
