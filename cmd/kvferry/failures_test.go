package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// failureIDs are the ids that docs/failures.md must answer: the inventory and the push reports of
// field-reports.md, and the hazards of nixl-connector.md and p2p-tier.md.
func failureIDs() []string {
	ids := []string{"C1", "C2", "C3", "L1", "S2", "S4", "B-001", "B-002", "B-004", "B-007", "B-008", "B-011"}
	for n := 1; n <= 17; n++ {
		if n != 15 { // not in the inventory
			ids = append(ids, fmt.Sprintf("I%d", n))
		}
	}
	for n := 1; n <= 30; n++ {
		ids = append(ids, fmt.Sprintf("H%d", n))
	}
	for n := 1; n <= 31; n++ {
		ids = append(ids, fmt.Sprintf("P2P-H%d", n))
	}
	ids = append(ids, "P2P-H8b")
	return ids
}

// Every fault is there once, says what happens, and names tests that exist.
func TestFailureTable(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join("..", "..", "docs", "failures.md"))
	if err != nil {
		t.Fatal(err)
	}
	tests := testNames{}
	seen := map[string]bool{}
	for i, line := range strings.Split(string(raw), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) == 6 || len(cells) == 1 || strings.HasPrefix(line, "|---") {
			continue // the table of times; text
		}
		if len(cells) == 9 && (tierRow.MatchString(strings.TrimSpace(cells[1])) || strings.TrimSpace(cells[1]) == "id") {
			cells = slices.Insert(cells, 7, "–") // no hand-off between a prefill and a decode engine
		}
		if len(cells) != 10 {
			t.Errorf("line %d has %d cells, not 8", i+1, len(cells)-2)
			continue
		}
		for j := range cells {
			cells[j] = strings.TrimSpace(cells[j])
		}
		id, modes, named := cells[1], cells[7], cells[8]
		if id == "id" {
			continue
		}
		if seen[id] {
			t.Errorf("%s comes twice", id)
		}
		seen[id] = true
		if cells[2] == "" || cells[3] == "" || cells[4] == "" {
			t.Errorf("%s does not say what P or D does", id)
		}
		checkNamed(t, tests, id, named)
		is, why, _ := strings.Cut(modes, ";")
		want := tests.modes(t, named)
		if tierRow.MatchString(id) {
			want = "–"
		}
		if strings.Contains(why, "open") || strings.Contains(named, "open") {
			t.Errorf("%s is open: %q, %q", id, modes, named)
		}
		if is != want || (is == "push" || is == "pull") && why == "" {
			t.Errorf("%s says modes %q, its tests run in %q; one mode alone needs a reason", id, modes, want)
		}
	}
	for _, id := range failureIDs() {
		if !seen[id] {
			t.Errorf("%s has no row", id)
		}
	}
	if len(seen) < len(failureIDs())+20 {
		t.Errorf("only %d rows", len(seen))
	}
}

var (
	namedTest = regexp.MustCompile("`([^`]+)`")
	testName  = regexp.MustCompile(`^([a-z0-9/]+)\.(Test[A-Za-z0-9_]+)(?:/([a-z0-9_]+))?$`)
	testFunc  = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9_]+)\(t \*testing\.T\)`)
)

// checkNamed checks the last cell of a row.
func checkNamed(t *testing.T, tests testNames, id, named string) {
	t.Helper()
	names := namedTest.FindAllStringSubmatch(named, -1)
	if len(names) == 0 {
		t.Errorf("%s names no test: %q", id, named)
	}
	for _, m := range names {
		n := testName.FindStringSubmatch(m[1])
		switch {
		case n == nil:
			t.Errorf("%s: %q is not the name of a test", id, m[1])
		case !slices.Contains(tests.of(t, n[1]), n[2]):
			t.Errorf("%s: %s has no %s", id, n[1], n[2])
		case n[3] != "": // a scenario file
			if _, err := os.Stat(filepath.Join("..", "..", filepath.FromSlash(n[1]), "testdata", "scenarios", n[3])); err != nil {
				t.Errorf("%s: %s has no scenario %s", id, n[1], n[3])
			}
		}
	}
}

// tierRow are the ids of what happens to the tier and between its peers.
var tierRow = regexp.MustCompile(`^(T\d|P2P|ST\d)`)

// Packages that know of no mode, and what in a test's source tells that it runs in both or in pull.
var (
	modeless  = regexp.MustCompile(`^(agent|peer|wire|geometry|internal|tier|engine/core|engine/metrics|proxy/core)(/|$)`)
	bothModes = regexp.MustCompile(`atEachPhase|inBothModes|eachMode|range modes|\brunEndurance|kv\.Push\b(?s:.*)kv\.Pull\b|kv\.Pull\b(?s:.*)(kv\.Push|a push)\b`)
	pullMode  = regexp.MustCompile(`(?i)pull`)
)

// modes is in which modes the tests that a row names run: push, pull, both, or – if no mode matters to the row.
func (n testNames) modes(t *testing.T, named string) string {
	t.Helper()
	push, pull, any := false, false, false
	for _, m := range namedTest.FindAllStringSubmatch(named, -1) {
		name := testName.FindStringSubmatch(m[1])
		if name == nil {
			continue
		}
		src := n.source(t, name[1], name[2])
		switch {
		case modeless.MatchString(name[1]):
			any = true
		case name[3] != "":
			pull = pull || strings.HasPrefix(name[3], "pull")
			push = push || !strings.HasPrefix(name[3], "pull")
		case bothModes.MatchString(src):
			push, pull = true, true
		default:
			pull = pull || pullMode.MatchString(src)
			push = push || !pullMode.MatchString(src)
		}
	}
	switch {
	case push && pull:
		return "both"
	case push:
		return "push"
	case pull:
		return "pull"
	case any:
		return "any"
	}
	return "–"
}

// source is a test function's.
func (n testNames) source(t *testing.T, dir, name string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", filepath.FromSlash(dir), "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		src, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if _, body, ok := strings.Cut(string(src), "\nfunc "+name+"("); ok {
			body, _, _ = strings.Cut(body, "\n}\n")
			return name + body
		}
	}
	return ""
}

// testNames are the tests of packages that were looked at, by directory.
type testNames map[string][]string

func (n testNames) of(t *testing.T, dir string) []string {
	t.Helper()
	if found, ok := n[dir]; ok {
		return found
	}
	files, err := filepath.Glob(filepath.Join("..", "..", filepath.FromSlash(dir), "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	found := []string{}
	for _, f := range files {
		src, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range testFunc.FindAllStringSubmatch(string(src), -1) {
			found = append(found, m[1])
		}
	}
	n[dir] = found
	return found
}
