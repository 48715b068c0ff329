package engine

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/tier"
	tiercore "github.com/kvferry/kvferry/tier/core"
	"github.com/kvferry/kvferry/wire"
)

const (
	busyEnv    = "KVFERRY_TEST_BUSY_SOURCE" // "dedicated?,nice,extra Ps,transport"
	busyBlock  = 8                          // tokens: of 8 KiB
	busyBlocks = 1000                       // of the prompt that the source has
	busyPrompt = busyBlocks*busyBlock + 1   // tokens: the last one is always computed
	busySlots  = 8 * busyBlocks             // of the source's tier
	busySleep  = 20 * time.Millisecond      // of a step that sleeps
	busyPulls  = 4                          // of one destination: a cold one, then warm ones
)

// busyModel is small, so that the last token of a long prompt costs little beside the way of the
// other tokens' KV. Both processes make the same.
var busyModel = sync.OnceValue(func() *model.Model {
	c := model.Config{Name: "busy", Vocab: tiny().Config().Vocab, Hidden: 128, Layers: 2, Heads: 1, KVHeads: 1, HeadDim: 64, FFN: 256,
		RopeTheta: 20, NormEps: 1e-5, MaxPosition: busyPrompt + busyBlock, BOS: -1, Tied: true}
	x := uint32(1)
	weights := func(n int) []float32 {
		w := make([]float32, n)
		for i := range w {
			x = x*1664525 + 1013904223
			w[i] = float32(x>>16)/(1<<18) - 0.125
		}
		return w
	}
	w := model.Weights{Embed: weights(c.Vocab * c.Hidden), Norm: weights(c.Hidden)}
	for range c.Layers {
		hd, h := c.HeadDim, c.Hidden
		w.Layers = append(w.Layers, model.LayerWeights{AttnNorm: weights(h), Q: weights(hd * h), K: weights(hd * h), V: weights(hd * h), O: weights(h * hd),
			FFNNorm: weights(h), Gate: weights(c.FFN * h), Up: weights(c.FFN * h), Down: weights(h * c.FFN)})
	}
	m, err := model.New(c, w, tiny().Tokenizer())
	if err != nil {
		panic("the benchmark's model: " + err.Error())
	}
	return m
})

func busyConfig(c *Config) {
	c.Model, c.BlockSize, c.Keys = busyModel(), busyBlock, model.RotatedKeys
	c.NumBlocks = busyBlocks + 200 // the source cannot keep the prompt and what it computes meanwhile
	c.Tier.Memory = int64(busySlots * tierBlockLen(*c))
	c.Tier.Secondaries = []string{TierP2P}
}

// BenchmarkTierBusySource is the time to the first token of a prompt of which a source, in a process of its
// own, has 1,000 blocks in its CPU tier. The source
//
//   - idles: its steps sleep; or
//   - is busy: it computes prompts on all cores without a pause and keeps their KV, and a goroutine takes, gives back and
//     evicts blocks of its tier all the time, also between a hit and its fetch.
//
// Who asks is cold, so that its first words are a dial, or warm. Rounds of all four take turns in one run, and those of an idle
// source beside another process that does what the busy one does: who asks shares its processors with either. Medians:
//
//   - busy_over_idle: both warm;
//   - beside_over_idle: what of that is only the lack of processors; busy_over_beside: what is not;
//   - cold_over_warm: both from the idle source; busy_cold_over_warm: from the busy one;
//   - paired_busy, paired_cold: the medians of the same ratios of rounds that follow each other, which move less when
//     the machine's other load changes;
//   - busy_cores: how many processors the busy source got. Where others leave it few, it is not busy;
//   - noise: one half of the warm ones from the idle source over the other half.
//
// kvferry is how an engine of `kvferry engine --tier p2p` computes; the others are other ways. apart is kvferry with
// half of the processors for the sources and the other half for who asks, as on two hosts: the source is busy on all
// that it has.
func BenchmarkTierBusySource(b *testing.B) {
	for _, m := range []struct{ name, env string }{
		{"kvferry", "true,5,2"}, {"apart", "true,5,2"}, {"dedicated", "true,0,2"}, {"nice15", "true,15,2"}, {"goroutines+2P", "false,0,2"}, {"goroutines", "false,0,0"},
	} {
		for _, by := range []string{TransportSHM, TransportTCP} {
			b.Run("as="+m.name+"/by="+by, func(b *testing.B) {
				var sources unix.CPUSet
				if m.name == "apart" {
					sources = halve(b)
				}
				busySource(b, by, m.env+","+by, sources)
			})
		}
	}
}

// halve gives this process half of its processors until the benchmark ends, and returns the others.
func halve(b *testing.B) (others unix.CPUSet) {
	b.Helper()
	var all, ours unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		b.Fatal(err)
	}
	if all.Count() < 2 {
		b.Skip("it needs two processors")
	}
	for cpu, n := 0, 0; n < all.Count(); cpu++ {
		switch {
		case !all.IsSet(cpu):
			continue
		case n < all.Count()/2:
			others.Set(cpu)
		default:
			ours.Set(cpu)
		}
		n++
	}
	procs := runtime.GOMAXPROCS(ours.Count())
	b.Cleanup(func() {
		runtime.GOMAXPROCS(procs)
		keepTo(b, &all)
	})
	keepTo(b, &ours)
	return others
}

// keepTo binds every thread of this process, and so those that they start.
func keepTo(b *testing.B, cpus *unix.CPUSet) {
	b.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		b.Fatal(err)
	}
	for _, t := range tasks {
		id, err := strconv.Atoi(t.Name())
		if err != nil {
			b.Fatal(err)
		}
		if err := unix.SchedSetaffinity(id, cpus); err != nil && err != unix.ESRCH { // it may have ended
			b.Fatal(err)
		}
	}
}

func busySource(b *testing.B, by, env string, cpus unix.CPUSet) {
	source, other := startSource(b, env, cpus), startSource(b, env, cpus)
	var states [3]struct{ cold, warm []time.Duration } // idle, busy, beside
	var noise [2][]time.Duration
	var pairedBusy, pairedCold []float64
	var worked, wall time.Duration // of the busy source's processors, and of its rounds
	for b.Loop() {
		var p50 [4]time.Duration
		for turn, state := range []int{0, 1, 2, 0} {
			source.tell(b, []string{"idle", "busy", "idle"}[state])
			other.tell(b, []string{"idle", "idle", "busy"}[state])
			begun, before := time.Now(), source.worked(b)
			cold, warm := source.pulls(b, by)
			if state == 1 {
				wall, worked = wall+time.Since(begun), worked+source.worked(b)-before
			}
			p50[turn] = quantile(warm, 0.5)
			if state == 0 {
				noise[turn/3] = append(noise[turn/3], warm...)
				pairedCold = append(pairedCold, ratio(cold, p50[turn]))
			}
			s := &states[state]
			s.cold, s.warm = append(s.cold, cold), append(s.warm, warm...)
		}
		pairedBusy = append(pairedBusy, 2*ratio(p50[1], p50[0]+p50[3]))
	}
	slices.Sort(pairedBusy)
	slices.Sort(pairedCold)
	idle, busy, beside := states[0], states[1], states[2]
	over := func(name string, x, y []time.Duration) {
		b.ReportMetric(ratio(quantile(x, 0.5), quantile(y, 0.5)), name)
	}
	b.ReportMetric(0, "ns/op")
	over("busy_over_idle", busy.warm, idle.warm)
	over("beside_over_idle", beside.warm, idle.warm)
	over("busy_over_beside", busy.warm, beside.warm)
	over("cold_over_warm", idle.cold, idle.warm)
	over("busy_cold_over_warm", busy.cold, busy.warm)
	over("noise", noise[0], noise[1])
	b.ReportMetric(pairedBusy[len(pairedBusy)/2], "paired_busy")
	b.ReportMetric(pairedCold[len(pairedCold)/2], "paired_cold")
	b.ReportMetric(worked.Seconds()/wall.Seconds(), "busy_cores")
	b.ReportMetric(float64(quantile(idle.warm, 0.5).Microseconds())/1000, "idle_ms")
}

// busyProcess is the source as the benchmark sees it.
type busyProcess struct {
	pid   int
	in    io.Writer
	out   *bufio.Reader
	host  string
	port  int
	asked int
}

// startSource starts a source on some processors; none is all.
func startSource(b *testing.B, env string, cpus unix.CPUSet) *busyProcess {
	b.Helper()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestBusySource$")
	cmd.Env, cmd.Stderr = append(os.Environ(), busyEnv+"="+env), os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := startOn(cmd, cpus); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	s := &busyProcess{pid: cmd.Process.Pid, in: in, out: bufio.NewReader(out)}
	host, port, _ := strings.Cut(s.line(b), ":")
	s.host = host
	if s.port, err = strconv.Atoi(port); err != nil {
		b.Fatal(err)
	}
	return s
}

// startOn starts a process from a thread that is bound to its processors, which it inherits.
func startOn(cmd *exec.Cmd, cpus unix.CPUSet) error {
	if cpus.Count() == 0 {
		return cmd.Start()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return err
	}
	if err := unix.SchedSetaffinity(0, &cpus); err != nil {
		return err
	}
	return errors.Join(cmd.Start(), unix.SchedSetaffinity(0, &before))
}

// tell says what the source is to do from now on, and waits until it does.
func (s *busyProcess) tell(b *testing.B, what string) {
	b.Helper()
	if _, err := fmt.Fprintln(s.in, what); err != nil {
		b.Fatal(err)
	}
	if got := s.line(b); got != what {
		b.Fatalf("the source says %q, not %q", got, what)
	}
}

// worked is the processor time that the source has had.
func (s *busyProcess) worked(b *testing.B) time.Duration {
	b.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.pid))
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	var ticks int64
	for _, f := range strings.Fields(rest)[11:13] { // user, system
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

func (s *busyProcess) line(b *testing.B) string {
	b.Helper()
	line, err := s.out.ReadString('\n')
	if err != nil {
		b.Fatalf("the source says %q: %v", line, err)
	}
	return strings.TrimSpace(line)
}

// pulls has an engine that the source does not know ask for the prompt several times.
func (s *busyProcess) pulls(b *testing.B, by string) (cold time.Duration, warm []time.Duration) {
	b.Helper()
	y := newEngine(b, func(c *Config) {
		busyConfig(c)
		c.Tier.Memory /= 4
		c.Transport = by
	})
	for at := 0; at < len(y.parts.tier.memory); at += os.Getpagesize() {
		y.parts.tier.memory[at] = 0 // the pages are there before anything is measured, as in any engine that has worked
	}
	for l := range y.parts.cache.Layers() {
		for i := range y.cfg.NumBlocks {
			clear(y.parts.cache.Block(l, kv.BlockID(i)))
		}
	}
	generate(b, y, Request{ID: "first", Prompt: prompt(busyBlock, 1), MaxTokens: 1})
	runtime.GC()
	for i := range busyPulls {
		if _, err := y.ResetPrefixCache(context.Background(), true); err != nil {
			b.Fatal(err)
		}
		time.Sleep(7 * time.Millisecond) // falls at another moment of the source's step
		s.asked++
		start := time.Now()
		a := generate(b, y, Request{ID: kv.RequestID(fmt.Sprint("r", i)), Prompt: prompt(busyPrompt, 9), MaxTokens: 1,
			Tier: wire.P2PParams{Source: &wire.P2PRemote{ID: fmt.Sprint("tx", s.asked), Host: s.host, Port: s.port}}})
		took := time.Since(start)
		if a.Err != nil || a.Usage.Tier != busyBlocks*busyBlock {
			b.Fatalf("pull %d: %v, %+v", i, a.Err, a.Usage)
		}
		if i == 0 {
			cold = took
		} else {
			warm = append(warm, took)
		}
	}
	if err := y.Close(context.Background()); err != nil {
		b.Fatal(err)
	}
	return cold, warm
}

// TestBusySource is the source's process: it does what the lines of its input say until that ends.
func TestBusySource(t *testing.T) {
	env, ok := os.LookupEnv(busyEnv)
	if !ok {
		t.Skip("it is for BenchmarkTierBusySource")
	}
	how := strings.Split(env, ",")
	nice, _ := strconv.Atoi(how[1])
	extra, _ := strconv.Atoi(how[2])
	cores := runtime.NumCPU()
	runtime.GOMAXPROCS(cores + extra)
	var sleep atomic.Bool
	e := newEngine(t, func(c *Config) {
		busyConfig(c)
		c.Threads, c.Dedicated, c.Nice, c.Transport = cores, how[0] == "true", nice, how[3]
		c.onStep = func() {
			if sleep.Load() {
				time.Sleep(busySleep)
			}
		}
	})
	generate(t, e, Request{ID: "seen", Prompt: prompt(busyPrompt, 9), MaxTokens: 1})
	tierSettled(t, e)
	busyFill(t, e.parts.tier.m)
	generate(t, e, Request{ID: "again", Prompt: prompt(busyPrompt, 9), MaxTokens: 1}) // which are now the last to be evicted
	fmt.Println(e.Coordinates().P2PAddress)
	var work sync.WaitGroup
	end := func() {}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		end()
		work.Wait()
		var ctx context.Context
		ctx, end = context.WithCancel(t.Context())
		sleep.Store(in.Text() == "idle")
		if in.Text() == "idle" {
			work.Go(func() { drowse(ctx, t, e) })
		} else {
			for i := range 2 { // one computes while the other is between two requests
				work.Go(func() { toil(ctx, t, e, i) })
			}
			work.Go(func() { hammerTier(ctx, t, e.parts.tier.m) })
		}
		fmt.Println(in.Text())
	}
	end()
	work.Wait()
}

// drowse has the engine make steps of one token each, which sleep.
func drowse(ctx context.Context, t *testing.T, e *Engine) {
	none := 0
	for i := 0; ctx.Err() == nil; i++ {
		busyAsk(ctx, t, e, Request{ID: kv.RequestID(fmt.Sprint("drowse", i)), Prompt: prompt(busyBlock, 8), MaxTokens: 1000,
			Tier: wire.P2PParams{MaxOffload: &none}})
	}
}

// toil has the engine compute prompts, whose KV its tier keeps, and ask for the one that the peer asks for:
// a tier forgets what nobody wants.
func toil(ctx context.Context, t *testing.T, e *Engine, who int) {
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprintf("toil%d.%d", who, i)
		busyAsk(ctx, t, e, Request{ID: kv.RequestID(name), Prompt: prompt(500, 100+2*i+who), MaxTokens: 1})
		if who == 0 {
			busyAsk(ctx, t, e, Request{ID: kv.RequestID(name + "seen"), Prompt: prompt(busyPrompt, 9), MaxTokens: 1})
		}
	}
}

func busyAsk(ctx context.Context, t *testing.T, e *Engine, r Request) {
	s, err := e.Submit(ctx, r)
	if err != nil {
		t.Error(err)
		return
	}
	read(t, s)
}

// hammerTier uses the book of a full tier as a crowd of requests would: it takes and gives back blocks, and lets the
// oldest be evicted.
func hammerTier(ctx context.Context, t *testing.T, m *tier.Manager) {
	const mine = "hammer"
	if err := m.Begin(tier.Request{ID: mine}); err != nil {
		t.Error(err)
		return
	}
	defer m.Finish(mine)
	keys := busyKeys(1<<30, 500)
	reserve := func(keys []tiercore.Key) {
		if res, ok := m.Reserve(mine, keys); ok {
			m.Commit(res.ID, true)
		}
	}
	reserve(keys)
	for every, step := time.NewTicker(500*time.Microsecond), uint32(0); ctx.Err() == nil; step += 2 {
		m.Touch(keys)
		if id, _, ok := m.Use(keys[:8]); ok { // few, as it reads them all for their checksums, without the lock
			m.EndUse(id)
		}
		reserve(busyKeys(2<<30+step, 2))
		<-every.C
	}
}

// busyFill leaves no slot of a tier free: whoever needs one evicts.
func busyFill(t *testing.T, m *tier.Manager) {
	if err := m.Begin(tier.Request{ID: "fill"}); err != nil {
		t.Fatal(err)
	}
	for i := range uint32(m.Stats().Free) {
		if res, ok := m.Reserve("fill", busyKeys(i, 1)); ok {
			m.Commit(res.ID, true)
		}
	}
	m.Finish("fill")
}

// busyKeys are keys of no prompt, n from the number first on.
func busyKeys(first uint32, n int) []tiercore.Key {
	keys := make([]tiercore.Key, n)
	for i := range keys {
		var k [36]byte // a hash and a group
		binary.BigEndian.PutUint32(k[:], first+uint32(i))
		keys[i] = tiercore.Key(k[:])
	}
	return keys
}
