package engine

import (
	"strings"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
)

// text makes the text of one request from its tokens and watches for stop strings. It holds back
// what may yet turn out to be the start of one. The loop owns it.
type text struct {
	decoder *model.Decoder
	stops   []string
	held    string // decoded, not given out
	stop    string // the stop string that ended the text
}

func newText(t *model.Tokenizer, stops []string) *text {
	return &text{decoder: t.NewDecoder(), stops: stops}
}

// push gives the text that became certain with a token, and whether a stop string ends it here.
func (t *text) push(x kv.Token) (out string, stopped bool) {
	t.held += t.decoder.Next(x)
	if at, stop := firstOf(t.held, t.stops); at >= 0 {
		out, t.held, t.stop = t.held[:at], "", stop
		return out, true
	}
	keep := startOfAny(t.held, t.stops)
	out, t.held = t.held[:len(t.held)-keep], t.held[len(t.held)-keep:]
	return out, false
}

// end gives what was held back, when no more tokens come.
func (t *text) end() string {
	if t.stop != "" {
		return ""
	}
	out := t.held + t.decoder.Flush()
	t.held = ""
	return out
}

// firstOf finds the stop string that begins first, the longest of those that begin there; -1 if
// there is none.
func firstOf(s string, stops []string) (int, string) {
	first, found := -1, ""
	for _, stop := range stops {
		at := strings.Index(s, stop)
		if at >= 0 && (first < 0 || at < first || at == first && len(stop) > len(found)) {
			first, found = at, stop
		}
	}
	return first, found
}

// startOfAny is the length of the longest end of s with which a stop string begins.
func startOfAny(s string, stops []string) int {
	longest := 0
	for _, stop := range stops {
		for n := min(len(stop)-1, len(s)); n > longest; n-- {
			if strings.HasSuffix(s, stop[:n]) {
				longest = n
				break
			}
		}
	}
	return longest
}
