package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

func storeUp(t *testing.T, args ...string) *process {
	t.Helper()
	return serverUp(t, append([]string{"store", "--listen", "127.0.0.1:0", "--p2p-listen", "127.0.0.1:0"}, args...)...)
}

// number adds up one number of a store's /metrics over its namespaces; -1 when it cannot be had.
func number(store *process, name string) float64 {
	v, err := gaugeSum(context.Background(), store.ready["url"], name)
	if err != nil {
		return -1
	}
	return v
}

// What one engine has offered another gets when the first is gone, over shared memory and over TCP; what
// was on its way when the store was told to stop is there when it is started again.
func TestStore(t *testing.T) {
	t.Parallel()
	for _, transport := range []string{"auto", "tcp"} {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "blocks")
			args := []string{"--size", "16MiB", "--fs", dir, "--fs-size", "16MiB", "--transport", transport}
			store := storeUp(t, args...)
			a := newCPUTier(t, store, "a model")
			a.compute(blockKeys(0, 20))
			eventually(t, "the store has them", func() bool {
				return number(store, "kvferry_store_blocks") == 20 && number(store, "kvferry_store_files") == 20
			})
			a.close()
			b := newCPUTier(t, store, "a model")
			if got := b.fetch(blockKeys(0, 22)); got != strings.Repeat("+", 20)+"--" {
				t.Errorf("another engine gets %s", got)
			}
			b.compute(blockKeys(20, 60))
			eventually(t, "the store has begun", func() bool {
				return number(store, "kvferry_store_offers_total") >= 60 && number(store, "kvferry_store_offers_waiting") == 0
			})
			store.signal(syscall.SIGTERM)
			if code := store.wait(); code != 0 {
				t.Fatalf("exit status %d:\n%s", code, store.output())
			}
			again := storeUp(t, args...)
			again.waitLine(func(l string) bool { return strings.Contains(l, "found 60 blocks") && strings.Contains(l, "dropped 0") })
			c := newCPUTier(t, again, "a model")
			if got := c.fetch(blockKeys(10, 62)); got != strings.Repeat("+", 50)+"--" {
				t.Errorf("after a restart: %s", got)
			}
		})
	}
}

// HTTP tells how the store is; what it does not know costs one line.
func TestStoreHTTP(t *testing.T) {
	t.Parallel()
	store := storeUp(t)
	get := func(path string) (int, string) {
		t.Helper()
		resp, err := http.Get(store.ready["url"] + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	if code, body := get("/health"); code != 200 || body != "{\"status\":\"ok\"}\n" {
		t.Errorf("/health: %d %s", code, body)
	}
	if code, body := get("/metrics"); code != 200 || !strings.Contains(body, "kvferry_store_peers_refused_total 0") {
		t.Errorf("/metrics: %d %s", code, body)
	}
	if code, body := get("/v1/completions"); code != 404 || !strings.Contains(body, "/health and /metrics") || strings.Count(body, "\n") != 1 {
		t.Errorf("/v1/completions: %d %s", code, body)
	}
	newCPUTier(t, store, "a model")
	other := launch(t, "store", "--listen", "127.0.0.1:0", "--p2p-listen", store.ready["p2p"])
	if code := other.wait(); code != 1 || !strings.Contains(other.output(), "in use by another program") {
		t.Errorf("a port in use: %d %s", code, other.output())
	}
	if _, body := get("/metrics"); !strings.Contains(body, "kvferry_store_blocks_room{namespace=") {
		t.Errorf("/metrics: %s", body)
	}
	store.signal(syscall.SIGTERM)
	if code := store.wait(); code != 0 {
		t.Errorf("exit status %d", code)
	}
}

// One store has the folder; a second is told which, and ends.
func TestStoreFolderInUse(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	store := storeUp(t, "--fs", dir)
	e := newCPUTier(t, store, "a model")
	e.compute(blockKeys(0, 1))
	eventually(t, "a file", func() bool { return number(store, "kvferry_store_files") == 1 })
	other := launch(t, "store", "--listen", "127.0.0.1:0", "--p2p-listen", "127.0.0.1:0", "--fs", dir)
	if code := other.wait(); code != 1 || !strings.Contains(other.output(), "another process") {
		t.Errorf("exit status %d: %s", code, other.output())
	}
}

func TestStoreUsage(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--sze 1GiB":                 "did you mean --size?",
		"--size much":                "256MiB",
		"--size 0":                   "more than 0",
		"--namespaces 0":             "1 to 64",
		"--transport carrier-pigeon": "use auto, shm, tcp",
		"--p2p-listen 0.0.0.0:0":     "--advertise-host",
		"--agent-listen :0":          "--advertise-host",
		"--p2p-listen nonsense":      "HOST:PORT",
		"an-argument":                "takes no arguments",
		"--p2p-listen 127.0.0.1:0 --listen 127.0.0.1:0 --fs " + file:         "(--fs): mkdir " + file + ": not a directory",
		"--p2p-listen 127.0.0.1:5 --agent-listen 127.0.0.1:5":                "--p2p-listen and --agent-listen are both 127.0.0.1:5;",
		"--listen 127.0.0.1:5 --p2p-listen 127.0.0.1:5":                      "--listen and --p2p-listen are both 127.0.0.1:5;",
		"--p2p-listen 127.0.0.1:5 --agent-listen 127.0.0.1:4 --namespaces 2": "--p2p-listen and the 2. namespace's --agent-listen are both 127.0.0.1:5;",
	} {
		p := launch(t, append([]string{"store"}, strings.Fields(args)...)...)
		if code := p.wait(); code == 0 || !strings.Contains(p.output(), want) || strings.Count(p.output(), "\n") > 1 {
			t.Errorf("%s: exit status %d, %q", args, code, p.output())
		}
	}
}

// An engine goes on without its store, and comes back to it by itself.
func TestStoreComesBack(t *testing.T) {
	t.Parallel()
	args := []string{"--size", "16MiB", "--fs", t.TempDir()}
	store := storeUp(t, args...)
	e := newCPUTier(t, store, "a model")
	e.compute(blockKeys(0, 8))
	eventually(t, "files", func() bool { return number(store, "kvferry_store_files") == 8 })
	store.kill()
	eventually(t, "the session's end", func() bool { return !e.peers.StoreUp() })
	if got := e.fetch(blockKeys(6, 10)); got != "++--" { // its own, and nothing is waited for
		t.Errorf("without a store: %s", got)
	}
	e.compute(blockKeys(10, 12))
	again := serverUp(t, append([]string{"store", "--listen", "127.0.0.1:0", "--p2p-listen", store.ready["p2p"]}, args...)...)
	eventually(t, "the engine has come back", func() bool {
		e.request(func(kv.RequestID) {})
		return e.peers.StoreUp()
	})
	eventually(t, "what was computed meanwhile", func() bool { return number(again, "kvferry_store_files") == 10 })
	e.m.Reset()
	if got := e.fetch(blockKeys(0, 12)); got != "++++++++--++" {
		t.Errorf("with the store again: %s", got)
	}
	e.compute(blockKeys(12, 14))
	eventually(t, "what is computed now", func() bool { return number(again, "kvferry_store_files") == 12 })
}

// A store that is started on the files of one model refuses an engine of another, says of both what they are and
// what to do, and has the blocks afterwards.
func TestStoreKeepsItsModel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	args := []string{"--size", "16MiB", "--fs", dir}
	store := storeUp(t, args...)
	a := newCPUTier(t, store, "a model")
	a.compute(blockKeys(0, 4))
	eventually(t, "files", func() bool { return number(store, "kvferry_store_files") == 4 })
	a.close()
	store.kill()
	again := storeUp(t, args...)
	b := startCPUTier(t, again, "another model")
	again.waitLine(func(l string) bool {
		return strings.Contains(l, "peer_refused") && strings.Contains(l, "a model") && strings.Contains(l, "another model") &&
			strings.Contains(l, "--namespaces") && strings.Contains(l, dir)
	})
	if b.peers.StoreUp() {
		t.Error("the newcomer is taken")
	}
	b.close()
	if got := newCPUTier(t, again, "a model").fetch(blockKeys(0, 5)); got != "++++-" {
		t.Errorf("afterwards: %s", got)
	}
}

// TestStoreAgentPorts: a store whose agents could not listen says so when it starts, in one line, and not when the
// first engine, or the one that needs the next namespace, comes.
func TestStoreAgentPorts(t *testing.T) {
	t.Parallel()
	second, err := net.Listen("tcp", "127.77.0.1:0") // where no other test takes the port before it
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	base := fmt.Sprintf("127.77.0.1:%d", second.Addr().(*net.TCPAddr).Port-1)
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"of the first namespace":  {[]string{"--agent-listen", second.Addr().String()}, 1, "--agent-listen " + second.Addr().String() + " is in use by another program"},
		"of the second namespace": {[]string{"--agent-listen", base, "--namespaces", "2", "--transport", "tcp"}, 1, "--agent-listen " + second.Addr().String() + " is in use by another program"},
		"no number":               {[]string{"--agent-listen", "127.0.0.1:http"}, 2, `port "http" is no number`},
		"not enough":              {[]string{"--agent-listen", "127.0.0.1:65535", "--namespaces", "2"}, 2, "fewer ports"},
		"another host's":          {[]string{"--agent-listen", "192.0.2.1:0"}, 2, "--agent-listen 192.0.2.1:0: "},
	} {
		p := launch(t, append([]string{"store", "--listen", "127.0.0.1:0", "--p2p-listen", "127.0.0.1:0"}, c.args...)...)
		if code, out := p.wait(), p.output(); code != c.code || !strings.Contains(out, c.says) || strings.Contains(out, "\n") {
			t.Errorf("%s: exit status %d, %s", name, code, out)
		}
	}
	var f storeFlags
	f.agentListen, f.namespaces, f.transport = second.Addr().String(), 2, "shm"
	if err := f.checkAgentPorts(); err != nil {
		t.Errorf("shared memory takes no port: %v", err)
	}
}
