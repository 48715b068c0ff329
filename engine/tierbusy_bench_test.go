package engine

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/wire"
)

const (
	busyEnv    = "KVFERRY_TEST_BUSY_SOURCE" // "busy?,dedicated?,nice,extra Ps"
	busyPrompt = 1600                       // tokens: 99 blocks, 3.2 MB
)

// BenchmarkTierBusySource is the time to the first token of a prompt whose KV a source has, in a
// process of its own: one that does nothing else, and one that computes on all cores without a
// pause, in several ways of doing so. Rounds take turns; the median of each is reported, over that of the
// idle one.
func BenchmarkTierBusySource(b *testing.B) {
	modes := []struct{ name, env string }{
		{"idle", "false,false,0,0"}, {"busy", "true,false,0,0"}, {"busy+2P", "true,false,0,2"},
		{"dedicated+2P", "true,true,0,2"}, {"nice5+2P", "true,true,5,2"}, {"nice15+2P", "true,true,15,2"},
	}
	took := make([][]time.Duration, len(modes))
	b.ResetTimer()
	for range b.N {
		for i, m := range modes {
			took[i] = append(took[i], busyRound(b, m.env, 10)...)
		}
	}
	b.StopTimer()
	idle := quantile(took[0], 0.5)
	b.ReportMetric(float64(idle.Microseconds())/1000, "idle_ms")
	for i, m := range modes[1:] {
		b.ReportMetric(ratio(quantile(took[i+1], 0.5), idle), m.name+"_ratio")
	}
	for i, m := range modes {
		slices.Sort(took[i])
		b.Logf("%-14s %v", m.name, took[i])
	}
}

// busyRound starts a source and fetches its prompt several times.
func busyRound(b *testing.B, env string, n int) (took []time.Duration) {
	b.Helper()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestBusySource$")
	cmd.Env = append(os.Environ(), busyEnv+"="+env)
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() {
		_ = in.Close()
		_ = cmd.Wait()
	}()
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	host, port, _ := strings.Cut(strings.TrimSpace(addr), ":")
	at, _ := strconv.Atoi(port)
	y := newEngine(b, func(c *Config) { withTier(TierP2P)(c); c.Tier.Memory *= 16 })
	for i := range n + 1 {
		if _, err := y.ResetPrefixCache(context.Background(), true); err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		a := generate(b, y, Request{ID: kv.RequestID(fmt.Sprint("r", i)), Prompt: prompt(busyPrompt, 9), MaxTokens: 1,
			Tier: wire.P2PParams{Source: &wire.P2PRemote{ID: fmt.Sprint("tx", i), Host: host, Port: at}}})
		if i > 0 { // the first one connects
			took = append(took, time.Since(start))
		}
		if a.Usage.Tier != (busyPrompt-1)/16*16 {
			b.Fatalf("%+v", a.Usage)
		}
		time.Sleep(20 * time.Millisecond) // falls at another moment of the source's step
	}
	return took
}

// TestBusySource is the source's process.
func TestBusySource(t *testing.T) {
	env, ok := os.LookupEnv(busyEnv)
	if !ok {
		t.Skip("it is for BenchmarkTierBusySource")
	}
	how := strings.Split(env, ",")
	nice, _ := strconv.Atoi(how[2])
	extra, _ := strconv.Atoi(how[3])
	cores := runtime.NumCPU()
	runtime.GOMAXPROCS(cores + extra)
	e := newEngine(t, func(c *Config) {
		withTier(TierP2P)(c)
		c.Tier.Memory *= 16
		c.Threads, c.Dedicated, c.Nice = cores, how[1] == "true", nice
	})
	generate(t, e, Request{ID: "seen", Prompt: prompt(busyPrompt, 9), MaxTokens: 1})
	tierSettled(t, e)
	ctx, end := context.WithCancel(t.Context())
	var work sync.WaitGroup
	if how[0] == "true" {
		work.Go(func() {
			none := 0
			for i := 0; ctx.Err() == nil; i++ {
				s, err := e.Submit(ctx, Request{ID: kv.RequestID(fmt.Sprint("busy", i)), Prompt: prompt(1000, 100+i), MaxTokens: 1,
					Tier: wire.P2PParams{MaxOffload: &none}})
				if err != nil {
					return
				}
				read(t, s)
			}
		})
	}
	fmt.Println(e.Coordinates().P2PAddress)
	_, _ = bufio.NewReader(os.Stdin).ReadByte() // until the benchmark has enough
	end()
	work.Wait()
}
