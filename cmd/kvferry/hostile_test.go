package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/kv"
)

const (
	// crowd is how many connections a stranger opens to one port.
	crowd = 2000
	// rudeGrowth bounds what strangers may cost a process, bytes: a crowd needs some 20 KiB for each
	// connection, and a collector that is behind doubles that.
	rudeGrowth = 256 << 20
	// rudeLines bounds what they may add to a log, lines per process.
	rudeLines = 100
)

// A stranger at any port of any process (engines and router, HTTP, agents, side channels) costs
// honest clients nothing, the processes a bounded amount of memory and the logs a few lines.
func TestHostileClients(t *testing.T) {
	t.Parallel()
	x := newTrio(t, kv.Push)
	want := x.tokens(t)
	all := []*process{x.prefill, x.decode, x.router}
	rss, lines := map[*process]int{}, map[*process]int{}
	for _, p := range all {
		rss[p], lines[p] = residentBytes(t, p), len(strings.Split(p.output(), "\n"))
	}
	honest := 0
	check := func(what string) {
		t.Helper()
		honest++
		x.same(t, what, want)
		for _, p := range all {
			if now := residentBytes(t, p); now-rss[p] > rudeGrowth {
				t.Errorf("%s: %s grew from %d to %d bytes", what, p.name, rss[p], now)
			}
		}
	}
	at := func(p *process) string { return strings.TrimPrefix(p.ready["url"], "http://") }
	for _, port := range []struct {
		name, addr string
		http       bool
	}{
		{"router", at(x.router), true}, {"prefill engine", at(x.prefill), true}, {"decode engine", at(x.decode), true},
		{"prefill agent", x.toPrefill.target, false}, {"decode agent", x.toDecode.target, false},
		{"prefill side channel", x.sides[0].target, false}, {"decode side channel", x.sides[1].target, false},
	} {
		attacks := []attack{randomBytes, halfAndGone}
		if port.http {
			attacks = append(attacks, halfRequests, unreadAnswers)
		}
		for i, attack := range attacks {
			end := attack(t, port.addr)
			check(fmt.Sprintf("%s, attack %d", port.name, i))
			end()
		}
		end := strangers(t, port.addr, crowd, "")
		check(port.name + ", a crowd")
		end()
		check(port.name + ", after the crowd")
	}
	x.home(t, true, true)
	for _, p := range all {
		t.Logf("%s: %d MiB more, %d lines more, %d honest requests", p.name, (residentBytes(t, p)-rss[p])>>20, len(strings.Split(p.output(), "\n"))-lines[p], honest)
		if more := len(strings.Split(p.output(), "\n")) - lines[p]; more > rudeLines+honest {
			t.Errorf("%s logged %d lines", p.name, more)
		}
	}
	// Who was there before knows its peers. Who comes now does not.
	x.decode.kill()
	x.decode = again(t, x.decode, x.decodeArgs)
	x.same(t, "after all", want)
}

// residentBytes is a process's VmRSS.
func residentBytes(t *testing.T, p *process) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	kb, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		t.Fatal(err)
	}
	return kb << 10
}

// attack bothers an address until the function that it returns is called.
type attack func(t *testing.T, addr string) func()

// strangers open n connections, say the same on each and then nothing.
func strangers(t *testing.T, addr string, n int, say string) func() {
	t.Helper()
	var conns []net.Conn
	for range n {
		c, err := net.DialTimeout("tcp", addr, patience)
		if err != nil {
			break // refused: that is an answer, too
		}
		conns = append(conns, c)
		_, _ = io.WriteString(c, say)
	}
	if len(conns) == 0 {
		t.Errorf("%s takes no connection", addr)
	}
	return func() {
		for _, c := range conns {
			_ = c.Close()
		}
	}
}

// randomBytes sends noise on many connections and waits for none of them.
func randomBytes(t *testing.T, addr string) func() {
	rng := rand.New(rand.NewPCG(4, 4))
	var ends []func()
	for range 100 {
		noise := make([]byte, 1+rng.IntN(8<<10))
		for i := range noise {
			noise[i] = byte(rng.Uint32())
		}
		ends = append(ends, strangers(t, addr, 1, string(noise)))
	}
	return func() {
		for _, end := range ends {
			end()
		}
	}
}

// halfAndGone breaks off in the middle of whatever it is, by a reset.
func halfAndGone(t *testing.T, addr string) func() {
	for _, begin := range []string{"", "P", "POST /v1/completions HTTP/1.1\r\nContent-Le", "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03", "\x00\x00\x00\x10KVF"} {
		for range 20 {
			c, err := net.DialTimeout("tcp", addr, patience)
			if err != nil {
				t.Errorf("%s: %v", addr, err)
				continue
			}
			_, _ = io.WriteString(c, begin)
			reset(c.(*net.TCPConn))
		}
	}
	return func() {}
}

// halfRequests announce a large body and send a byte of it.
func halfRequests(t *testing.T, addr string) func() {
	return strangers(t, addr, 200, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 60000000\r\n\r\n{")
}

// unreadAnswers ask for long streams and do not read them.
func unreadAnswers(t *testing.T, addr string) func() {
	body := `{"model":"kvferry-tiny","prompt":"hello","max_tokens":1000,"stream":true,"ignore_eos":true}`
	return strangers(t, addr, 20, fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
}
