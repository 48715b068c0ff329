package core

import (
	"bytes"

	"github.com/kvferry/kvferry/openai"
)

var cachedKey = []byte(`"cached_tokens"`)

// SetCached puts P's count of cached prompt tokens into D's answer: D would count all that came from P
// as cached (proxy.md, section 4). Everything else stays to the byte, and so does an answer without
// the field.
func SetCached(answer []byte, n int) []byte {
	if !bytes.Contains(answer, cachedKey) {
		return answer
	}
	o, err := openai.ParseObject(answer)
	if err != nil || !openai.SetCachedTokens(o, n) {
		return answer
	}
	return o.Bytes()
}

// SetCachedEvents does the same for whole events of D's stream.
func SetCachedEvents(events []byte, n int) []byte {
	if !bytes.Contains(events, cachedKey) {
		return events
	}
	var out []byte
	var reader openai.EventReader
	err := reader.Feed(events, func(ev openai.Event) error {
		raw := ev.Raw
		if edited := SetCached(ev.Data, n); bytes.Contains(raw, ev.Data) && !bytes.Equal(edited, ev.Data) {
			raw = bytes.Replace(raw, ev.Data, edited, 1)
		}
		out = append(out, raw...)
		return nil
	})
	if err != nil {
		return events
	}
	return append(out, reader.Pending()...)
}
