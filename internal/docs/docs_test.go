// Package docs checks that what the documents say of the code is so: identifiers exist, links lead
// somewhere, command lines parse, the README's example compiles and the walkthrough's trace is that
// of a run.
package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// documents are all that is checked for links and paths; identifiers are looked for in those that
// name them in full.
var (
	withIdentifiers = []string{"README.md", "docs/architecture.md", "docs/walkthrough.md"}
	fence           = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```\\s*?$")
	span            = regexp.MustCompile("`([^`\n]+)`")
	identifier      = regexp.MustCompile(`^([a-z][a-z0-9]*(?:/[a-z][a-z0-9]*)*)\.([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?(?:\(.*\))?$`)
	link            = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading         = regexp.MustCompile(`(?m)^#+ (.+)$`)
	machinePath     = regexp.MustCompile("(?m)(^|[\\s\"'`(=])(/(?:work|tmp|root|home|mnt|usr|var|opt)/[^\\s\"'`)]*)")
)

func read(t *testing.T, doc string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(root, doc))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func documents(t *testing.T) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(all) == 0 {
		t.Fatalf("no documents: %v", err)
	}
	out := []string{"README.md"}
	for _, f := range all {
		out = append(out, "docs/"+filepath.Base(f))
	}
	return out
}

func TestIdentifiersExist(t *testing.T) {
	code := parseTree(t)
	for _, doc := range withIdentifiers {
		found := 0
		for _, m := range span.FindAllStringSubmatch(fence.ReplaceAllString(read(t, doc), ""), -1) {
			id := identifier.FindStringSubmatch(m[1])
			if id == nil || !code.known(id[1]) || isFile(id[2]) {
				continue
			}
			found++
			if !code.has(id[1], id[2], id[3]) {
				t.Errorf("%s names %s, which is not in the code", doc, m[1])
			}
		}
		t.Logf("%s: %d identifiers", doc, found)
		if doc == "docs/walkthrough.md" && found < 100 {
			t.Errorf("%s: only %d identifiers were found", doc, found)
		}
	}
}

// isFile tells `limits.go` from an identifier.
func isFile(ext string) bool {
	return slices.Contains([]string{"go", "md", "mod", "sum", "txt", "json", "safetensors"}, ext)
}

func TestLinksLeadSomewhere(t *testing.T) {
	for _, doc := range documents(t) {
		text := fence.ReplaceAllString(read(t, doc), "")
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(m[1], "#")
			target := doc
			if path != "" {
				target = filepath.Join(filepath.Dir(doc), path)
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s links to %s, which does not exist", doc, m[1])
			} else if anchor != "" && !slices.Contains(anchors(read(t, target)), anchor) {
				t.Errorf("%s links to %s, but %s has no such heading", doc, m[1], target)
			}
		}
	}
}

var notInAnchor = regexp.MustCompile(`[^\p{L}\p{N} _-]`)

// anchors are a document's headings as links name them.
func anchors(text string) (out []string) {
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		out = append(out, strings.ReplaceAll(notInAnchor.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return out
}

func TestNoPathOfOneMachine(t *testing.T) {
	for _, doc := range documents(t) {
		for _, m := range machinePath.FindAllStringSubmatch(read(t, doc), -1) {
			t.Errorf("%s names the path %s", doc, m[2])
		}
	}
}

// TestCommandLinesParse gives every kvferry command line of the README and the walkthrough to the
// program, with --help behind it: flags are read, with their values, and nothing is started. Each
// flag that the program has must be shown in the README.
func TestCommandLinesParse(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "kvferry")
	build := exec.Command("go", "build", "-o", bin, "./cmd/kvferry")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	tried := 0
	for _, doc := range []string{"README.md", "docs/walkthrough.md"} {
		for _, line := range commandLines(read(t, doc)) {
			tried++
			out, err := exec.Command(bin, append(line, "--help")...).CombinedOutput()
			if err != nil {
				t.Errorf("%s: kvferry %s: %v\n%s", doc, strings.Join(line, " "), err, out)
			}
		}
	}
	if tried < 30 {
		t.Errorf("only %d command lines were found", tried)
	}
	readme := read(t, "README.md")
	for _, command := range []string{"up", "engine", "router"} {
		out, err := exec.Command(bin, command, "--help").Output()
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^ +(?:-\w, )?(--[a-z0-9-]+)`).FindAllStringSubmatch(string(out), -1) {
			if !regexp.MustCompile(m[1] + `\b`).MatchString(readme) {
				t.Errorf("README.md does not show %s of kvferry %s", m[1], command)
			}
		}
	}
}

var commandLine = regexp.MustCompile(`^(?:go run \./cmd/|\./|bin/)?kvferry((?: .*)?)$`)

// commandLines are the arguments of every kvferry line in the shell blocks and code spans of a text.
func commandLines(text string) (out [][]string) {
	var candidates []string
	for _, b := range fence.FindAllStringSubmatch(text, -1) {
		if b[1] == "sh" {
			candidates = append(candidates, strings.Split(strings.ReplaceAll(b[2], "\\\n", " "), "\n")...)
		}
	}
	for _, m := range span.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		candidates = append(candidates, m[1])
	}
	for _, line := range candidates {
		line, _, _ = strings.Cut(line, " #")
		line = strings.TrimSuffix(strings.TrimSpace(line), "&")
		if m := commandLine.FindStringSubmatch(line); m != nil {
			args := strings.Fields(m[1])
			for i, a := range args {
				args[i] = strings.Trim(a, "'")
			}
			out = append(out, args)
		}
	}
	return out
}

// TestReadmeShowsTheExample: the README's longest Go block is the example that compiles and runs.
func TestReadmeShowsTheExample(t *testing.T) {
	source, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(source), "\t// README begin\n")
	body, _, ok := strings.Cut(rest, "\t// README end")
	if !ok {
		t.Fatal("example_test.go has no marks")
	}
	body = strings.TrimSpace(regexp.MustCompile(`(?m)^\t`).ReplaceAllString(body, ""))
	shown := ""
	for _, b := range fence.FindAllStringSubmatch(read(t, "README.md"), -1) {
		if b[1] == "go" && len(b[2]) > len(shown) {
			shown = b[2]
		}
	}
	if strings.TrimSpace(shown) != body {
		t.Errorf("README.md shows\n%s\nthe example is\n%s", shown, body)
	}
}
