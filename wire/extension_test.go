package wire

import (
	"bytes"
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"
)

func sampleExtension() *Extension {
	return &Extension{Version: 1, Instance: "0f3a", HostID: "boot-1",
		Agents:       []AgentOffer{{"shm", []byte{1}}, {"tcp", []byte("10.0.0.1:7000")}},
		Capabilities: []string{"push_fail"}}
}

func drawExtension(t *rapid.T) *Extension {
	if !rapid.Bool().Draw(t, "has extension") {
		return nil
	}
	name := rapid.StringN(1, 20, MaxName)
	e := &Extension{
		Version:  rapid.IntRange(1, MaxTokens).Draw(t, "version"),
		Instance: name.Draw(t, "instance"),
		HostID:   rapid.StringN(0, 20, MaxName).Draw(t, "host"),
	}
	transports := rapid.SliceOfNDistinct(name, 0, 4, rapid.ID).Draw(t, "transports")
	slices.Sort(transports)
	for _, tr := range transports {
		e.Agents = append(e.Agents, AgentOffer{tr, rapid.SliceOf(rapid.Byte()).Draw(t, "blob")})
	}
	if c := rapid.SliceOfN(name, 0, 4).Draw(t, "capabilities"); len(c) > 0 {
		e.Capabilities = c
	}
	return e
}

// withExtension gives metadata with these bytes as the value of "kvferry".
func withExtension(t testing.TB, ext []byte) []byte {
	b, err := AppendAgentMetadata(nil, sampleMetadata(), ConnectorVersion)
	if err != nil {
		t.Fatal(err)
	}
	b[2]++
	return append(msgp.AppendString(b, extensionKey), ext...)
}

func TestExtensionIsTheLastKey(t *testing.T) {
	m := sampleMetadata()
	m.Extension = sampleExtension()
	b, err := AppendAgentMetadata(nil, m, ConnectorVersion)
	if err != nil {
		t.Fatal(err)
	}
	if want := withExtension(t, m.Extension.append(nil)); !bytes.Equal(b, want) {
		t.Errorf("% x\nwant\n% x", b, want)
	}
}

func TestExtensionBytes(t *testing.T) {
	e := sampleExtension()
	slices.Reverse(e.Agents) // the order on the wire is by transport all the same
	want := "\x85\xa7version\x01\xa8instance\xa40f3a\xa7host_id\xa6boot-1\xa6agents\x82\xa3shm\xc4\x01\x01" +
		"\xa3tcp\xc4\x0d10.0.0.1:7000\xaccapabilities\x91\xa9push_fail"
	if got := e.append(nil); string(got) != want {
		t.Errorf("%q\nwant\n%q", got, want)
	}
	if e.Agents[0].Transport != "tcp" {
		t.Error("encoding reordered the caller's agents")
	}
}

func TestExtensionOfLaterVersion(t *testing.T) {
	m, err := DecodeAgentMetadata(withExtension(t, []byte("\x83\xa7version\x09\xa8instance\xa1i\xa3new\x91\x81\x01\xc0")))
	if d := cmp.Diff(&Extension{Version: 9, Instance: "i"}, m.Extension); d != "" || err != nil {
		t.Errorf("%v %s", err, d)
	}
}

func TestExtensionRefusals(t *testing.T) {
	many := msgp.AppendString([]byte("\x83\xa7version\x01\xa8instance\xa1i"), "agents")
	many = msgp.AppendMapHeader(many, MaxAgents+1)
	for i := range MaxAgents + 1 {
		many = append(msgp.AppendString(many, strconv.Itoa(i)), "\xc4\x00"...)
	}
	for name, c := range map[string]struct {
		ext, field string
		kind       error
	}{
		"nil":              {"\xc0", "kvferry", ErrType},
		"list":             {"\x90", "kvferry", ErrType},
		"no version":       {"\x81\xa8instance\xa1i", "kvferry.version", ErrMissing},
		"no instance":      {"\x81\xa7version\x01", "kvferry.instance", ErrMissing},
		"version 0":        {"\x82\xa7version\x00\xa8instance\xa1i", "kvferry.version", ErrRange},
		"float version":    {"\x82\xa7version\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\xa8instance\xa1i", "kvferry.version", ErrType},
		"empty instance":   {"\x82\xa7version\x01\xa8instance\xa0", "kvferry.instance", ErrRange},
		"str blob":         {"\x83\xa7version\x01\xa8instance\xa1i\xa6agents\x81\xa3tcp\xa1x", "kvferry.agents[0]", ErrType},
		"transport twice":  {"\x83\xa7version\x01\xa8instance\xa1i\xa6agents\x82\xa3tcp\xc4\x00\xa3tcp\xc4\x00", "kvferry.agents", ErrRange},
		"empty transport":  {"\x83\xa7version\x01\xa8instance\xa1i\xa6agents\x81\xa0\xc4\x00", "kvferry.agents", ErrRange},
		"too many agents":  {string(many), "kvferry.agents", ErrLimit},
		"empty capability": {"\x83\xa7version\x01\xa8instance\xa1i\xaccapabilities\x91\xa0", "kvferry.capabilities", ErrRange},
		"many capabilities": {"\x83\xa7version\x01\xa8instance\xa1i\xaccapabilities\xdc\x00\x41" + strings.Repeat("\xa1c", MaxCapabilities+1),
			"kvferry.capabilities", ErrLimit},
	} {
		_, err := DecodeAgentMetadata(withExtension(t, []byte(c.ext)))
		var de *DecodeError
		if !errors.As(err, &de) || de.Field != c.field || !errors.Is(err, c.kind) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestExtensionIsCheckedBeforeSending(t *testing.T) {
	for name, mutate := range map[string]func(*Extension){
		"version":    func(e *Extension) { e.Version = 0 },
		"instance":   func(e *Extension) { e.Instance = "" },
		"host":       func(e *Extension) { e.HostID = strings.Repeat("h", MaxName+1) },
		"blob":       func(e *Extension) { e.Agents[0].Blob = make([]byte, MaxAgentBlob+1) },
		"transport":  func(e *Extension) { e.Agents[0].Transport = "tcp" },
		"capability": func(e *Extension) { e.Capabilities[0] = "\xff" },
	} {
		m := sampleMetadata()
		m.Extension = sampleExtension()
		mutate(m.Extension)
		if _, err := AppendAgentMetadata(nil, m, ConnectorVersion); err == nil {
			t.Errorf("%s: encoded", name)
		}
	}
}

func TestExtensionHas(t *testing.T) {
	var none *Extension
	if none.Has("push_fail") || !sampleExtension().Has("push_fail") || sampleExtension().Has("push") {
		t.Error("wrong capabilities")
	}
}
