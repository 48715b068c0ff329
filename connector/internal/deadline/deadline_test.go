package deadline

import (
	"sort"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Against a plain sorted slice: what is due comes out in order of time, then of insertion.
func TestQueueAgainstSortedSlice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type plain struct{ id, at, order int }
		base := time.Unix(1000, 0)
		var q Queue[int]
		items := make([]Item[int], 8)
		for i := range items {
			items[i].Value = i
		}
		var want []plain
		order := 0
		find := func(id int) int {
			for i, p := range want {
				if p.id == id {
					return i
				}
			}
			return -1
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			id := rapid.IntRange(0, len(items)-1).Draw(t, "id")
			at := rapid.IntRange(0, 10).Draw(t, "at")
			switch rapid.SampledFrom([]string{"set", "remove", "pop"}).Draw(t, "op") {
			case "set":
				q.Set(&items[id], base.Add(time.Duration(at)))
				if i := find(id); i >= 0 {
					want[i].at = at
				} else {
					order++
					want = append(want, plain{id, at, order})
				}
			case "remove":
				q.Remove(&items[id])
				if i := find(id); i >= 0 {
					want = append(want[:i], want[i+1:]...)
				}
			case "pop":
				sort.Slice(want, func(a, b int) bool {
					return want[a].at < want[b].at || want[a].at == want[b].at && want[a].order < want[b].order
				})
				got, ok := q.PopDue(base.Add(time.Duration(at)))
				due := len(want) > 0 && want[0].at <= at
				if ok != due || ok && got != want[0].id {
					t.Fatalf("popped %d, %v; want %v of %v", got, ok, due, want)
				}
				if due {
					want = want[1:]
				}
			}
			if q.Len() != len(want) {
				t.Fatalf("holds %d items, want %d", q.Len(), len(want))
			}
			min, any := 99, false
			for _, p := range want {
				any = true
				if p.at < min {
					min = p.at
				}
			}
			next, ok := q.Next()
			if ok != any || ok && !next.Equal(base.Add(time.Duration(min))) {
				t.Fatalf("next is %v, %v", next, ok)
			}
		}
	})
}
