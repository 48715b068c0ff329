package core

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/openai"
)

// Merge makes one answer of the answers to the parts of a request, as a single engine would give it:
// the choices of part i get the index i, a prompt's tokens count once. Only what names the part is
// edited, everything else stays to the byte. It belongs to one goroutine.
type Merge struct {
	id        string // leads the parts' X-Request-Ids
	perPrompt int
	withUsage bool // the client wants usage at the end of a stream
	streamed  bool
	answerID  []byte // of the first part; nil: none yet
	created   []byte
	usage     []*openai.Object // by part
	parts     []*openai.Object // whole answers, by part
	last      *openai.Object   // a part's chunk with usage, to make the one of all of
}

// NewMerge is the merge of n answers, perPrompt neighbours to each prompt, whose requests have ids that
// begin with id.
func NewMerge(id string, n, perPrompt int, withUsage bool) *Merge {
	return &Merge{id: id, perPrompt: perPrompt, withUsage: withUsage, usage: make([]*openai.Object, n), parts: make([]*openai.Object, n)}
}

// Streamed tells whether the answer is a stream.
func (m *Merge) Streamed() bool { return m.streamed }

// Whole takes the whole answer of a part.
func (m *Merge) Whole(part int, body []byte) error {
	o, err := openai.ParseObject(body)
	if err != nil {
		return err
	}
	m.name(o)
	m.parts[part] = o
	return m.keepUsage(part, o)
}

// Events takes whole events of a part's stream and gives those for the client, in new memory. The end of
// the part's stream and its usage are kept for the end of all; an error is its request's to tell.
func (m *Merge) Events(part int, events []byte) ([]byte, error) {
	m.streamed = true
	var out []byte
	var reader openai.EventReader
	err := reader.Feed(events, func(ev openai.Event) error {
		switch {
		case ev.Data == nil:
			out = append(out, ev.Raw...)
			return nil
		case string(ev.Data) == openai.Done || bytes.HasPrefix(ev.Data, []byte(`{"error"`)):
			return nil
		}
		chunk, err := m.chunk(part, bytes.Clone(ev.Data))
		if chunk != nil {
			out = openai.AppendEvent(out, chunk)
		}
		return err
	})
	return out, err
}

// chunk edits one chunk; nil: it is not for the client.
func (m *Merge) chunk(part int, data []byte) ([]byte, error) {
	o, err := openai.ParseObject(data)
	if err != nil {
		return nil, err
	}
	m.name(o)
	choices, ok := openai.Elements(o.Present("choices"), MaxAnswers)
	if !ok {
		return nil, errors.New("a chunk has no choices")
	}
	if len(choices) == 0 {
		m.last = o
		return nil, m.keepUsage(part, o)
	}
	if err := setIndex(o, choices, part); err != nil {
		return nil, err
	}
	return o.Bytes(), nil
}

// setIndex names the part in its choices: it has one, of which a stream has a piece in each chunk.
func setIndex(o *openai.Object, choices [][]byte, part int) error {
	for i, raw := range choices {
		c, err := openai.ParseObject(raw)
		if err != nil {
			return err
		}
		if got := string(c.Present("index")); got != "0" {
			return fmt.Errorf("it has a choice of index %.20q", got)
		}
		c.Set("index", strconv.AppendInt(nil, int64(part), 10))
		choices[i] = c.Bytes()
	}
	o.Set("choices", openai.JoinElements(choices))
	return nil
}

// name gives all parts the id and the time of the first, without the part's own number.
func (m *Merge) name(o *openai.Object) {
	if m.answerID == nil {
		m.answerID = o.Raw("id")
		if before, _, ok := strings.Cut(string(m.answerID), m.id+"."); ok {
			m.answerID = []byte(before + m.id + `"`)
		}
		m.created = o.Raw("created")
	}
	if m.answerID != nil && o.Raw("id") != nil {
		o.Set("id", m.answerID)
	}
	if m.created != nil && o.Raw("created") != nil {
		o.Set("created", m.created)
	}
}

func (m *Merge) keepUsage(part int, o *openai.Object) error {
	raw := o.Present("usage")
	if raw == nil {
		return nil
	}
	u, err := openai.ParseObject(raw)
	m.usage[part] = u
	return err
}

// total is the usage of all parts; nil if none has told it.
func (m *Merge) total() []byte {
	var sum *openai.Object
	for first := 0; first < len(m.usage); first += m.perPrompt {
		one := m.totalOfPrompt(m.usage[first:min(first+m.perPrompt, len(m.usage))])
		switch {
		case one == nil:
		case sum == nil:
			sum = one
		default:
			openai.AddUsage(sum, one, true)
		}
	}
	if sum == nil {
		return nil
	}
	return sum.Bytes()
}

// totalOfPrompt is the usage of all answers to one prompt, which counts once. What the first of them to be
// computed did not find in a cache was not there: the others have found what that one computed.
func (m *Merge) totalOfPrompt(answers []*openai.Object) *openai.Object {
	var sum *openai.Object
	least := -1
	for _, u := range answers {
		if n, ok := openai.UsageCached(u); ok && (least < 0 || n < least) {
			least = n
		}
		switch {
		case u == nil:
		case sum == nil:
			sum = u.Clone()
		default:
			openai.AddUsage(sum, u, false)
		}
	}
	if least >= 0 {
		openai.SetUsageCached(sum, least)
	}
	return sum
}

// Body is the whole answer, once every part has given its own.
func (m *Merge) Body() ([]byte, error) {
	var choices [][]byte
	for i, o := range m.parts {
		if o == nil {
			return nil, fmt.Errorf("part %d has given no answer", i)
		}
		own, ok := openai.Elements(o.Present("choices"), MaxAnswers)
		if !ok || len(own) != 1 {
			return nil, fmt.Errorf("part %d has %d choices instead of one", i, len(own))
		}
		if err := setIndex(o, own, i); err != nil {
			return nil, err
		}
		choices = append(choices, own...)
	}
	out := m.parts[0].Clone()
	out.Set("choices", openai.JoinElements(choices))
	if total := m.total(); total != nil {
		out.Set("usage", total)
	}
	return out.Bytes(), nil
}

// End is the end of a stream: usage, if it was asked for and is known, and [DONE].
func (m *Merge) End() []byte {
	var out []byte
	if total := m.total(); m.withUsage && total != nil && m.last != nil {
		o := m.last.Clone()
		o.Set("choices", []byte("[]"))
		o.Set("usage", total)
		out = openai.AppendEvent(out, o.Bytes())
	}
	return openai.AppendDone(out)
}
