package engine

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/kv"
)

// Whatever the cuts between tokens: the text given out, all together, is the text up to the first
// stop string, and no part of a stop string is ever given out before it is known to be none.
func TestTextAgainstWholeText(t *testing.T) {
	tok := tiny().Tokenizer()
	rapid.Check(t, func(t *rapid.T) {
		alphabet := rapid.StringOfN(rapid.SampledFrom([]rune("abä€")), 0, 12, -1)
		all := alphabet.Draw(t, "text")
		stops := rapid.SliceOfN(rapid.StringOfN(rapid.SampledFrom([]rune("abä€")), 1, 4, -1), 0, 3).Draw(t, "stops")
		x := newText(tok, stops)
		var got strings.Builder
		stopped := false
		for i, id := range tok.Encode(all) {
			out, stop := x.push(id)
			got.WriteString(out)
			if stop {
				stopped = true
				break
			}
			// What is out may not be followed by a stop string that it has begun itself.
			for _, s := range stops {
				for n := 1; n < len(s); n++ {
					if strings.HasSuffix(got.String(), s[:n]) && strings.HasPrefix(string([]byte(all)[got.Len():]), s[n:]) {
						t.Fatalf("token %d: %q is out, which begins the stop string %q of %q", i, got.String(), s, all)
					}
				}
			}
		}
		got.WriteString(x.end())
		want, wantStop := firstEnd(all, stops)
		if got.String() != want || stopped != wantStop || stopped != (x.stop != "") {
			t.Fatalf("%q with stops %q gives %q (%v, %q), want %q (%v)", all, stops, got.String(), stopped, x.stop, want, wantStop)
		}
	})
}

// firstEnd is where the text ends: before the stop string that is complete first, and of those
// complete at once before the one that begins first.
func firstEnd(all string, stops []string) (string, bool) {
	for n := range len(all) + 1 {
		best := -1
		for _, s := range stops {
			if at := strings.Index(all[:n], s); at >= 0 && (best < 0 || at < best) {
				best = at
			}
		}
		if best >= 0 {
			return all[:best], true
		}
	}
	return all, false
}

func TestTextOfBrokenCharacters(t *testing.T) {
	x := newText(tiny().Tokenizer(), nil)
	out, _ := x.push(kv.Token(0xe2))
	if out != "" {
		t.Errorf("half a character gave %q", out)
	}
	if end := x.end(); end != "\ufffd" {
		t.Errorf("its end gave %q", end)
	}
}
