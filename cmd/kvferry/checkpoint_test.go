package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kvferry/kvferry/engine/model"
)

// What the command writes is the built-in model, in the type asked for, also over an older one.
func TestCheckpoint(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "new", "tiny")
	sizes := map[string]int64{}
	for _, weights := range []string{"f32", "bf16"} {
		p := launch(t, "checkpoint", dir, "--weights", weights)
		if code := p.wait(); code != 0 || !strings.Contains(p.output(), "wrote kvferry-tiny") {
			t.Fatalf("exit status %d: %s", code, p.output())
		}
		m, err := model.Load(dir)
		if err != nil {
			t.Fatal(err)
		}
		got, want := m.Config(), model.Tiny().Config()
		want.Name = "tiny"
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
		if m.Digest() != model.Tiny().Digest() {
			t.Errorf("%s: other weights", weights)
		}
		info, err := os.Stat(filepath.Join(dir, "model.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		sizes[weights] = info.Size()
	}
	if sizes["f32"] < 3*sizes["bf16"]/2 {
		t.Errorf("sizes: %v", sizes)
	}
}

func TestCheckpointRefuses(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"checkpoint"}, 2, "takes one argument, the directory"},
		{[]string{"checkpoint", "a", "b"}, 2, "takes one argument, the directory"},
		{[]string{"checkpoint", "x", "--weights", "f64"}, 2, `--weights "f64" is unknown, use bf16 or f32`},
		{[]string{"checkpoint", file}, 1, file},
	} {
		p := launch(t, c.args...)
		if code := p.wait(); code != c.code || !strings.Contains(p.output(), c.want) {
			t.Errorf("%v: exit status %d, want %d with %q: %s", c.args, code, c.code, c.want, p.output())
		}
	}
}
