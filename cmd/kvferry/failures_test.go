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

// Every fault is there once, says what happens, and names tests that exist or why it is open.
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
		if len(cells) != 9 {
			t.Errorf("line %d has %d cells, not 7", i+1, len(cells)-2)
			continue
		}
		for j := range cells {
			cells[j] = strings.TrimSpace(cells[j])
		}
		id, named := cells[1], cells[7]
		if id == "id" {
			continue
		}
		if seen[id] {
			t.Errorf("%s comes twice", id)
		}
		seen[id] = true
		open := strings.Contains(named, "open: ")
		if cells[2] == "" || !open && (cells[3] == "" || cells[4] == "") {
			t.Errorf("%s does not say what P or D does", id)
		}
		checkNamed(t, tests, id, named)
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
	namedTest   = regexp.MustCompile("`([^`]+)`")
	testName    = regexp.MustCompile(`^([a-z0-9/]+)\.(Test[A-Za-z0-9_]+)(?:/([a-z0-9_]+))?$`)
	openBecause = regexp.MustCompile(`open: \w+.*\w`)
	testFunc    = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9_]+)\(t \*testing\.T\)`)
)

// checkNamed checks the last cell of a row.
func checkNamed(t *testing.T, tests testNames, id, named string) {
	t.Helper()
	names := namedTest.FindAllStringSubmatch(named, -1)
	if len(names) == 0 && !openBecause.MatchString(named) {
		t.Errorf("%s names no test and is not open for a reason: %q", id, named)
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
