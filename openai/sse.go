package openai

import (
	"bytes"
	"fmt"
)

// Done is the data of the event that ends every complete stream.
const Done = "[DONE]"

// EventStream is the content type of server-sent events.
const EventStream = "text/event-stream"

// AppendEvent appends one event with the given data. Line breaks in the data become several data
// lines, as the format asks; JSON written by encoding/json has none.
func AppendEvent(dst, data []byte) []byte {
	for {
		i := bytes.IndexAny(data, "\r\n")
		dst = append(dst, "data: "...)
		if i < 0 {
			dst = append(dst, data...)
			return append(dst, "\n\n"...)
		}
		dst = append(append(dst, data[:i]...), '\n')
		if data[i] == '\r' && i+1 < len(data) && data[i+1] == '\n' {
			i++
		}
		data = data[i+1:]
	}
}

// AppendDone appends the event that ends a stream.
func AppendDone(dst []byte) []byte { return AppendEvent(dst, []byte(Done)) }

// AppendComment appends a line that clients skip; it keeps a silent connection open. The text must
// have no line break.
func AppendComment(dst []byte, text string) []byte {
	return append(append(append(dst, ": "...), text...), "\n\n"...)
}

// EventReader cuts a stream of server-sent events, given in pieces of any size, into whole events.
// The zero value is ready. One goroutine.
type EventReader struct {
	buf     []byte // from the start of the first event that is not whole yet
	scanned int    // bytes of buf that were looked at
	line    int    // where the current line begins
	begun   bool   // buf[:line] has a line that is not empty
	skipLF  bool   // the last piece ended with a CR: an LF right behind it is no line of its own
}

// Event is one event. Both slices are valid until the next call of Feed.
type Event struct {
	Raw  []byte // the bytes as they came, with the empty line that ends it; nothing is left out
	Data []byte // the data lines, joined by '\n'; nil if the event has none, as a comment
}

// Feed takes the next bytes and calls f for each event that they complete, in order. It fails when
// an event exceeds MaxEventBytes, after which the reader must not be used again, and when f fails.
// The bytes of p are copied.
func (r *EventReader) Feed(p []byte, f func(Event) error) error {
	r.buf = append(r.buf, p...)
	if r.skipLF && len(p) > 0 {
		r.skipLF = false
		if p[0] == '\n' {
			r.scanned++
			r.line++
		}
	}
	start := 0
	for r.scanned < len(r.buf) {
		i := r.scanned
		c := r.buf[i]
		r.scanned++
		if c != '\n' && c != '\r' {
			continue
		}
		atEnd := i+1 == len(r.buf)
		if c == '\r' && !atEnd && r.buf[i+1] == '\n' {
			r.scanned++
		}
		// A CR at the very end may have its LF in the next piece; the line ends here all the same.
		empty := i == r.line
		r.line = r.scanned
		if c == '\r' && atEnd {
			r.skipLF = true
		}
		if !empty {
			r.begun = true
			continue
		}
		if !r.begun {
			continue // an empty line before an event: kept, so that raw bytes are complete
		}
		ev := Event{Raw: r.buf[start:r.scanned]}
		ev.Data = dataOf(ev.Raw)
		start = r.scanned
		r.begun = false
		if err := f(ev); err != nil {
			return err
		}
	}
	if start > 0 {
		r.buf = append(r.buf[:0], r.buf[start:]...)
		r.scanned -= start
		r.line -= start
	}
	if len(r.buf) > MaxEventBytes {
		return fmt.Errorf("a server-sent event is larger than %d bytes", MaxEventBytes)
	}
	return nil
}

// Pending is the bytes of an event that is not whole yet: not empty when a stream was cut.
func (r *EventReader) Pending() []byte { return r.buf }

// dataOf joins the data lines of one event.
func dataOf(raw []byte) []byte {
	var data []byte
	found := false
	for len(raw) > 0 {
		end := bytes.IndexAny(raw, "\r\n")
		if end < 0 {
			end = len(raw)
		}
		line := raw[:end]
		raw = raw[min(end+1, len(raw)):]
		rest, ok := bytes.CutPrefix(line, []byte("data"))
		if !ok || len(rest) > 0 && rest[0] != ':' {
			continue
		}
		if len(rest) > 0 {
			rest = bytes.TrimPrefix(rest[1:], []byte(" "))
		}
		if found {
			data = append(append(append(make([]byte, 0, len(data)+len(rest)+1), data...), '\n'), rest...)
		} else {
			data = rest[:len(rest):len(rest)]
		}
		found = true
	}
	if found && data == nil {
		data = []byte{}
	}
	return data
}
