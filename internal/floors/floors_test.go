// Package floors checks that imports point down only, as docs/architecture.md draws the house.
package floors

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/kvferry/kvferry/"

// floor of each package family; a subpackage not listed belongs to its parent's family.
var floor = map[string]int{
	"kv":            0,
	"wire":          1,
	"event":         1,
	"openai":        1,
	"internal/zmtp": 1,
	"geometry":      2,
	"agent":         3,
	"peer":          4,
	"connector":     5,
	"tier":          5,
	"proxy":         6,
	"engine":        6,
	"cmd/kvferry":   8,
	"internal/docs": 8, // tests only
}

// pure packages may not use sockets, clocks that tick, goroutine helpers, files or logs.
var pure = []string{"kv", "wire", "event", "openai", "geometry", "connector/scheduler", "engine/core", "proxy/core", "tier/core", "tier/p2p/session", "tier/store/intake"}

var impure = map[string]bool{"net": true, "net/http": true, "os": true, "os/exec": true, "log": true, "log/slog": true, "sync": true, "syscall": true, "context": true}

func TestImportsPointDown(t *testing.T) {
	for _, p := range packages(t) {
		name := strings.TrimPrefix(p.ImportPath, module)
		fam, lvl, ok := family(name)
		if !ok {
			if name != "internal/floors" {
				t.Errorf("package %s stands on no floor: name it in docs/architecture.md and here", name)
			}
			continue
		}
		for _, imp := range p.Imports {
			dep, inside := strings.CutPrefix(imp, module)
			if !inside {
				continue
			}
			depFam, depLvl, _ := family(dep)
			if depFam != fam && depLvl >= lvl {
				t.Errorf("%s (floor %d) imports %s (floor %d)", name, lvl, dep, depLvl)
			}
		}
	}
}

func TestPureCoresImportNoDrivers(t *testing.T) {
	byName := map[string]pkg{}
	for _, p := range packages(t) {
		byName[strings.TrimPrefix(p.ImportPath, module)] = p
	}
	for _, name := range pure {
		p, ok := byName[name]
		if !ok {
			t.Errorf("pure package %s is gone", name)
		}
		for _, imp := range p.Imports {
			if impure[imp] {
				t.Errorf("%s is pure, but imports %s", name, imp)
			}
		}
	}
}

type pkg struct {
	ImportPath string
	Imports    []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) < 10 {
		t.Fatalf("go list found only %d packages", len(all))
	}
	return all
}

func family(name string) (string, int, bool) {
	for n := name; ; {
		if l, ok := floor[n]; ok {
			return n, l, true
		}
		i := strings.LastIndex(n, "/")
		if i < 0 {
			return "", 0, false
		}
		n = n[:i]
	}
}
