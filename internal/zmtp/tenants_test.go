package zmtp

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Whatever is done, the account is exact and within its bounds, and only a host that had the most pays.
func TestTenants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const places, bytes = 6, 1000
		acc := newTenants(places, bytes)
		hosts := []string{"h0", "h1", "h2"}
		books := make(map[*tenant]int) // who is in, and with how many bytes
		drop := func(e *tenant) { delete(books, e) }
		var evicted []*tenant
		now := time.Unix(0, 0)
		count := func(host string) (n int) {
			for e := range books {
				if e.host == host {
					n++
				}
			}
			return n
		}
		held := func(host string) (n int) {
			for e := range books {
				if e.host == host {
					n += books[e]
				}
			}
			return n
		}
		pick := func() *tenant {
			if len(books) == 0 {
				return nil
			}
			byAge := slices.SortedFunc(maps.Keys(books), func(a, b *tenant) int { return a.seen.Compare(b.seen) })
			return rapid.SampledFrom(byAge).Draw(t, "which")
		}
		t.Repeat(map[string]func(*rapid.T){
			"enter": func(t *rapid.T) {
				now = now.Add(time.Second)
				e := &tenant{host: fmt.Sprint("h", rapid.IntRange(0, 2).Draw(t, "host"))}
				e.evict = func(error) { evicted = append(evicted, e) }
				full, own := len(books) == places, count(e.host)
				evicted = nil
				err := acc.enter(e, now)
				for _, v := range evicted {
					if !full {
						t.Fatalf("evicted while there was room")
					}
					for o := range books {
						if v.up && !o.up && o.host == v.host {
							t.Fatalf("a working connection paid before a half-open one")
						}
					}
					if v.host != e.host {
						if count(v.host) < own+2 {
							t.Fatalf("%s with %d places paid for %s with %d", v.host, count(v.host), e.host, own)
						}
						for _, h := range hosts {
							if count(h) > count(v.host) {
								t.Fatalf("%s paid, %s has more", v.host, h)
							}
						}
					} else if v.up {
						t.Fatalf("a working connection was exchanged for a new one of its host")
					}
					drop(v)
				}
				if err == nil {
					books[e] = 0
				} else if !full {
					t.Fatalf("refused with %d places taken: %v", len(books), err)
				} else if len(evicted) > 0 {
					t.Fatalf("evicted for nothing")
				}
			},
			"settle": func(t *rapid.T) {
				if e := pick(); e != nil {
					acc.settle(e)
				}
			},
			"charge": func(t *rapid.T) {
				e := pick()
				if e == nil {
					return
				}
				n := rapid.IntRange(-books[e], 600).Draw(t, "bytes")
				books[e] += n
				evicted = nil
				err := acc.charge(e, n)
				gone := false
				for _, v := range evicted {
					for _, h := range hosts {
						if held(h) > held(v.host) {
							t.Fatalf("%s paid with %d bytes, %s holds %d", v.host, held(v.host), h, held(h))
						}
					}
					gone = gone || v == e
					drop(v)
				}
				if gone != (err != nil) {
					t.Fatalf("charge says %v, evicted: %v", err, gone)
				}
			},
			"leave": func(t *rapid.T) {
				if e := pick(); e != nil {
					acc.leave(e)
					drop(e)
				}
			},
			"": func(t *rapid.T) {
				sum := 0
				for e := range books {
					sum += books[e]
				}
				if len(acc.mu.all) != len(books) || len(books) > places {
					t.Fatalf("%d places taken, %d expected", len(acc.mu.all), len(books))
				}
				if acc.mu.held != sum || sum > bytes || sum < 0 {
					t.Fatalf("%d bytes held, %d expected", acc.mu.held, sum)
				}
			},
		})
	})
}
