package connector

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const demands = 77

// docs/conformance.md answers every demand once, and every test that it names exists.
func TestConformanceTable(t *testing.T) {
	root := ".."
	raw, err := os.ReadFile(filepath.Join(root, "docs", "conformance.md"))
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string][]string{} // by package directory
	seen := map[int]bool{}
	name := regexp.MustCompile("^`([a-z0-9/]+)\\.(Test[A-Za-z0-9_]+)`$")
	for i, line := range strings.Split(string(raw), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) != 7 {
			continue
		}
		for j := range cells {
			cells[j] = strings.TrimSpace(cells[j])
		}
		n, err := strconv.Atoi(cells[1])
		if err != nil {
			continue // the head of a table
		}
		if n < 1 || n > demands || seen[n] {
			t.Errorf("line %d: demand %d is not one of 1 to %d, or comes twice", i+1, n, demands)
		}
		seen[n] = true
		if cells[2] == "" {
			t.Errorf("demand %d is not said", n)
		}
		status, how, named := cells[3], cells[4], cells[5]
		if !slices.Contains([]string{"kept", "replaced", "open"}, status) {
			t.Errorf("demand %d has status %q", n, status)
		}
		if status == "replaced" && how == "" {
			t.Errorf("demand %d is replaced; by what and why is not said", n)
		}
		if named == "" {
			if status != "open" {
				t.Errorf("demand %d is %s and names no test", n, status)
			}
			continue
		}
		for _, one := range strings.Split(named, ", ") {
			m := name.FindStringSubmatch(one)
			if m == nil {
				t.Errorf("demand %d: %q is not a test's name", n, one)
				continue
			}
			if !slices.Contains(testsOf(t, root, m[1], tests), m[2]) {
				t.Errorf("demand %d: %s has no %s", n, m[1], m[2])
			}
		}
	}
	for n := 1; n <= demands; n++ {
		if !seen[n] {
			t.Errorf("demand %d has no row", n)
		}
	}
}

var testFunc = regexp.MustCompile(`(?m)^func (Test[A-Za-z0-9_]+)\(t \*testing\.T\)`)

// testsOf are the tests in a package's directory.
func testsOf(t *testing.T, root, dir string, known map[string][]string) []string {
	t.Helper()
	if found, ok := known[dir]; ok {
		return found
	}
	files, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(dir), "*_test.go"))
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
	known[dir] = found
	return found
}
