package zmtp

import (
	"bufio"
	"bytes"
	"errors"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// python returns a Python that has zmq: $KVFERRY_PYTHON, else python3.
func python(t *testing.T) string {
	name := os.Getenv("KVFERRY_PYTHON")
	if name == "" {
		name = "python3"
	}
	if out, err := exec.Command(name, "-c", "import zmq").CombinedOutput(); err != nil {
		t.Skipf("%s has no zmq (set KVFERRY_PYTHON to one that has): %v\n%s", name, err, out)
	}
	return name
}

// startEcho runs a libzmq socket that echoes, and returns its address.
func startEcho(t *testing.T, args ...string) string {
	cmd := exec.CommandContext(within(t), python(t), append([]string{"testdata/peer.py", "echo"}, args...)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("libzmq echo: %v\n%s", err, stderr.String())
		}
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("libzmq echo did not start: %v", err)
	}
	return net.JoinHostPort("127.0.0.1", strings.TrimSpace(line))
}

// ask runs a libzmq client against a Router of ours that echoes.
func ask(t *testing.T, opts Options, args ...string) {
	interpreter := python(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r, err := Listen(t.Context(), ln, opts)
	if err != nil {
		t.Fatal(err)
	}
	over := make(chan error, 1)
	go func() { over <- echo(r) }()
	port := strconv.Itoa(ln.Addr().(*net.TCPAddr).Port)
	args = slices.Insert(args, 1, port)
	cmd := exec.CommandContext(within(t), interpreter, append([]string{"testdata/peer.py", "ask"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("ok")) {
		t.Errorf("libzmq client: %v\n%s", err, out)
	}
	if err := r.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if err := <-over; !errors.Is(err, ErrClosed) {
		t.Errorf("Recv after Close: %v", err)
	}
}

// shapes mirrors SHAPES of testdata/peer.py.
func shapes() [][][]byte {
	var many [][]byte
	for i := range 60 {
		many = append(many, []byte{byte(i)})
	}
	var all [256]byte
	for i := range all {
		all[i] = byte(i)
	}
	return [][][]byte{
		{[]byte("hello")},
		{{}},
		{[]byte("a"), {}, []byte("c")},
		{bytes.Repeat([]byte("x"), 255)},
		{bytes.Repeat([]byte("x"), 256)},
		{[]byte("head"), bytes.Repeat(all[:], 4096), []byte("tail")},
		{bytes.Repeat([]byte("y"), 70000), bytes.Repeat([]byte("z"), 65536)},
		many,
	}
}

func sameFrames(a, b [][]byte) bool { return slices.EqualFunc(a, b, bytes.Equal) }

func TestLibzmqReqToRouter(t *testing.T) {
	t.Parallel()
	ask(t, Options{}, "req")
}

func TestLibzmqDealerToRouter(t *testing.T) {
	t.Parallel()
	ask(t, Options{}, "dealer", "--identity", "127.0.0.1:5820", "--count", "200")
}

// A libzmq peer whose PINGs go unanswered closes after HEARTBEAT_TIMEOUT, here well within the idle time.
func TestLibzmqHeartbeatsOfClient(t *testing.T) {
	t.Parallel()
	ask(t, Options{}, "dealer", "--heartbeat", "100,1000,1000", "--idle", "2.5")
}

// The other way: our own PINGs, answered by libzmq, keep an idle connection; unanswered they would end it.
func TestLibzmqAnswersOurHeartbeats(t *testing.T) {
	t.Parallel()
	ask(t, Options{Heartbeat: Heartbeat{Every: 100 * time.Millisecond, Timeout: time.Second, TTL: time.Second}},
		"req", "--idle", "2.5")
}

func TestReqToLibzmqRouter(t *testing.T) {
	t.Parallel()
	r, err := DialReq(within(t), nil, startEcho(t, "router"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, want := range shapes() {
		got, err := r.Request(within(t), want...)
		if err != nil {
			t.Fatal(err)
		}
		if !sameFrames(got, want) {
			t.Fatalf("echo of %d frames differs", len(want))
		}
	}
}

func TestDealerToLibzmqRouter(t *testing.T) {
	t.Parallel()
	dealerToLibzmq(t, startEcho(t, "router"), 0)
}

func TestDealerToLibzmqDealer(t *testing.T) {
	t.Parallel()
	dealerToLibzmq(t, startEcho(t, "dealer"), 0)
}

// The stock P2P tier's ROUTER sends PINGs to our DEALER, which is idle most of the time.
func TestLibzmqHeartbeatsOfServer(t *testing.T) {
	t.Parallel()
	dealerToLibzmq(t, startEcho(t, "router", "--heartbeat", "100,1000,1000"), 2500*time.Millisecond)
}

func dealerToLibzmq(t *testing.T, addr string, idle time.Duration) {
	d, err := DialDealer(within(t), nil, addr, Options{Identity: "127.0.0.1:5822"})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for _, want := range shapes() {
		if err := d.Send(within(t), want...); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range shapes() {
		got, err := d.Recv(within(t))
		if err != nil {
			t.Fatal(err)
		}
		if !sameFrames(got, want) {
			t.Fatalf("echo of %d frames differs", len(want))
		}
	}
	if idle > 0 {
		select {
		case <-d.Done():
			t.Fatalf("libzmq hung up on an idle connection: %v", d.Err())
		case <-time.After(idle):
		}
	}
	if err := d.Send(within(t), []byte("last")); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Recv(within(t)); err != nil || !sameFrames(got, [][]byte{[]byte("last")}) {
		t.Fatalf("last echo: %q, %v", got, err)
	}
	if err := d.Shutdown(within(t)); err != nil {
		t.Fatalf("Shutdown: %v", err)
	}
}

// A libzmq client that is refused for its identity dials again and comes in once the name is free.
func TestLibzmqDuplicateIdentityRetries(t *testing.T) {
	t.Parallel()
	interpreter := python(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := make(chan error, 100)
	r, err := Listen(t.Context(), ln, Options{OnEnd: func(p Peer, _ string, err error) {
		if p == (Peer{}) {
			refused <- err
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	go func() { _ = echo(r) }()
	first, err := DialDealer(within(t), nil, ln.Addr().String(), Options{Identity: "same"})
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	go func() {
		if err := <-refused; !errors.Is(err, ErrIdentityInUse) {
			t.Errorf("second connection ended with %v", err)
		}
		first.Close()
	}()
	port := strconv.Itoa(ln.Addr().(*net.TCPAddr).Port)
	cmd := exec.CommandContext(within(t), interpreter, "-c", `
import sys, zmq
s = zmq.Context().socket(zmq.DEALER)
s.linger, s.rcvtimeo, s.identity = 0, 30000, b"same"
s.connect("tcp://127.0.0.1:" + sys.argv[1])
s.send(b"kept")
print(s.recv())
s.context.destroy(0)`, port)
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("kept")) {
		t.Errorf("libzmq client: %v\n%s", err, out)
	}
}
