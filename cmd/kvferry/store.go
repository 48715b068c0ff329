package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/agent"
	"github.com/kvferry/kvferry/agent/choose"
	"github.com/kvferry/kvferry/agent/shm"
	"github.com/kvferry/kvferry/tier/store"
)

// storeFlags is the command line of `kvferry store`.
type storeFlags struct {
	listen        string
	p2pListen     string
	advertiseHost string
	agentListen   string
	transport     string
	size, fsSize  byteSize
	folder        string
	namespaces    int
	drain         time.Duration
	log           logFlags
}

func newStore() *cobra.Command {
	f := storeFlags{size: 1 << 30, fsSize: 10 << 30}
	cmd := &cobra.Command{
		Use:   "store",
		Short: "Hold KV blocks for engines, without a model",
		Long: "Hold KV blocks that engines have computed and serve them to all engines with the same model: a cache\n" +
			"for a rack. Engines that name it by --p2p-store offer it what they compute; it fetches that over the P2P\n" +
			"protocol and serves it likewise, so that a prompt that any of them has seen is loaded and not computed. Blocks are\n" +
			"in memory, and with --fs also in files that outlive the store. The first engine fixes which model's blocks\n" +
			"are held; for more models at a time give --namespaces. The store prints a line beginning with `ready` when\n" +
			"engines can connect, and stops on SIGTERM or Ctrl-C after what was on its way is there.",
		Example: "  kvferry store\n" +
			"  kvferry store --size 64GiB --fs /var/cache/kvferry --fs-size 1TiB\n" +
			"  kvferry store --p2p-listen 0.0.0.0:5710 --agent-listen 0.0.0.0:5711 --advertise-host 10.0.0.9\n" +
			"  kvferry engine --cpu-cache 256MiB --tier p2p --p2p-store 127.0.0.1:5710   # an engine that uses it",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseIdle(cmd.Flags(), need{[]string{"fs-size"}, f.folder != "", "a folder (--fs DIR)"}); err != nil {
				return err
			}
			return runStore(cmd.Context(), cmd.OutOrStdout(), f)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&f.listen, "listen", "127.0.0.1:8003", "`HOST:PORT` of HTTP: /health and /metrics; port 0 picks a free one")
	fl.StringVar(&f.p2pListen, "p2p-listen", "127.0.0.1:5710", "`HOST:PORT` where engines connect; port 0 picks a free one")
	fl.StringVar(&f.advertiseHost, "advertise-host", "", "`HOST` that engines know it by; default: that of --p2p-listen")
	fl.StringVar(&f.agentListen, "agent-listen", "", "`HOST:PORT` where engines send blocks, of the first namespace; the next ones take the ports that follow; default: the host of --p2p-listen and free ports")
	fl.StringVar(&f.transport, "transport", "auto", "`TRANSPORT` of KV blocks: auto (shm with engines on this host, else tcp), shm or tcp")
	fl.Var(&f.size, "size", "`SIZE` of the memory for blocks, such as 64GiB")
	fl.StringVar(&f.folder, "fs", "", "`DIR` where blocks are kept in files too; they outlive the store")
	fl.Var(&f.fsSize, "fs-size", "`SIZE` that the files may have together")
	fl.IntVar(&f.namespaces, "namespaces", 1, "how many `MODELS`' blocks are held at most; memory and files are divided evenly")
	fl.DurationVar(&f.drain, "drain", 10*time.Second, "how long blocks that are on their way may take after SIGTERM")
	f.log.add(fl)
	return cmd
}

// check finds what cannot work before anything is opened.
func (f *storeFlags) check() error {
	if f.size < 1 || f.fsSize < 1 {
		return usagef("--size and --fs-size must be more than 0")
	}
	if err := checkDrain(f.drain); err != nil {
		return err
	}
	if f.namespaces < 1 || f.namespaces > store.MaxNamespaces {
		return usagef("--namespaces %d, must be 1 to %d", f.namespaces, store.MaxNamespaces)
	}
	if !slices.Contains(choose.Transports, f.transport) {
		return usagef("--transport %q is unknown, use %s", f.transport, strings.Join(choose.Transports, ", "))
	}
	host, _, err := net.SplitHostPort(f.p2pListen)
	if err != nil {
		return usagef("--p2p-listen %s: %v; give HOST:PORT", f.p2pListen, err)
	}
	if f.agentListen == "" {
		f.agentListen = net.JoinHostPort(host, "0")
	}
	if _, _, err := net.SplitHostPort(f.agentListen); err != nil {
		return usagef("--agent-listen %s: %v; give HOST:PORT", f.agentListen, err)
	}
	for flag, addr := range map[string]string{"p2p-listen": f.p2pListen, "agent-listen": f.agentListen} {
		if ip := hostIP(addr); f.advertiseHost == "" && ip != nil && ip.IsUnspecified() {
			return usagef("--%s %s is every interface; say with --advertise-host by which host engines reach this one", flag, addr)
		}
	}
	return f.checkPorts()
}

// checkPorts refuses a port that is given twice.
func (f *storeFlags) checkPorts() error {
	all := []listenAt{{"--listen", f.listen}, {"--p2p-listen", f.p2pListen}}
	for n := range f.namespaces {
		addr, err := f.agentAddr(n)
		if err != nil {
			return err
		}
		flag := "--agent-listen"
		if n > 0 {
			flag = fmt.Sprintf("the %d. namespace's --agent-listen", n+1)
		}
		if f.transport != shm.Transport {
			all = append(all, listenAt{flag, addr})
		}
	}
	return checkDistinct(all...)
}

// checkAgentPorts takes and leaves the address of each namespace's agent: the agents themselves are made when the first
// engines come, and an operator should not have to wait for those to learn that a port is in use.
func (f *storeFlags) checkAgentPorts() error {
	if f.transport == shm.Transport {
		return nil
	}
	for n := range f.namespaces {
		addr, err := f.agentAddr(n)
		if err != nil {
			return err
		}
		l, err := listen("--agent-listen", addr)
		if err != nil {
			return err
		}
		_ = l.Close()
		if strings.HasSuffix(addr, ":0") {
			break // any free port, each time
		}
	}
	return nil
}

// agentAddr is where the agent of the n-th namespace listens.
func (f *storeFlags) agentAddr(n int) (string, error) {
	host, port, _ := net.SplitHostPort(f.agentListen) // check has looked
	p, err := strconv.Atoi(port)
	switch {
	case err != nil || p < 0 || p > math.MaxUint16:
		return "", usagef("--agent-listen %s: port %q is no number of 0 to 65535; give HOST:PORT", f.agentListen, port)
	case p != 0 && p+n > math.MaxUint16:
		return "", usagef("--agent-listen %s: there are fewer ports from it on than the %d --namespaces; choose a lower one, or port 0 for any free ones", f.agentListen, f.namespaces)
	case p != 0:
		p += n
	}
	return net.JoinHostPort(host, strconv.Itoa(p)), nil
}

// agentOf makes the agent of the n-th namespace.
func (f *storeFlags) agentOf(id string, log *slog.Logger) func(n int) (agent.Agent, error) {
	var made atomic.Int64 // agents of one place follow each other, and peers may still know the earlier one's name
	return func(n int) (agent.Agent, error) {
		addr, err := f.agentAddr(n)
		if err != nil {
			return nil, err
		}
		return choose.New(choose.Config{
			Name:      agent.Name(fmt.Sprintf("store-%s-%d-%d", id, n, made.Add(1))),
			Transport: f.transport, Listen: addr, AdvertiseHost: f.advertiseHost, Log: log,
		})
	}
}

func runStore(ctx context.Context, w io.Writer, f storeFlags) error {
	log, err := f.log.logger(os.Stderr)
	if err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	l, err := listen("--listen", f.listen)
	if err != nil {
		return err
	}
	s, name, err := f.open(log)
	if err != nil {
		_ = l.Close()
		return err
	}
	srv, err := storeServer(s, log)
	if err != nil {
		_ = l.Close()
		_ = s.Close()
		return err
	}
	fmt.Fprintf(w, "ready store url=http://%s p2p=%s\n", l.Addr(), name)
	return serve(ctx, log, l, srv, f.drain, func(bound context.Context) error {
		s.Drain(bound)
		return s.Close()
	})
}

// open makes the store, and gives the name by which engines know it.
func (f *storeFlags) open(log *slog.Logger) (*store.Store, string, error) {
	ln, err := listen("--p2p-listen", f.p2pListen)
	if err != nil {
		return nil, "", err
	}
	if err := f.checkAgentPorts(); err != nil {
		_ = ln.Close()
		return nil, "", err
	}
	host, _, _ := net.SplitHostPort(f.p2pListen) // check has looked
	if f.advertiseHost != "" {
		host = f.advertiseHost
	}
	name := net.JoinHostPort(host, strconv.Itoa(ln.Addr().(*net.TCPAddr).Port))
	var id, secret [8]byte
	_, _ = rand.Read(id[:]) // never fails
	_, _ = rand.Read(secret[:])
	s, err := store.New(store.Config{
		Listener: ln, Name: name, Size: int64(f.size), Namespaces: f.namespaces, Folder: f.folder, FolderSize: int64(f.fsSize),
		Agent: f.agentOf(hex.EncodeToString(id[:]), log), Instance: hex.EncodeToString(secret[:]), HostID: choose.HostID(),
		OnNote: func(n store.Note) { logStoreNote(log, n) },
	})
	if err != nil {
		_ = ln.Close()
		return nil, "", err
	}
	return s, name, nil
}

func logStoreNote(log *slog.Logger, n store.Note) {
	level := slog.LevelInfo
	switch {
	case n.Bad:
		level = slog.LevelWarn
	case n.What == "stray_message" || n.What == "message_ignored":
		level = slog.LevelDebug
	}
	attrs := []slog.Attr{slog.String("what", n.What)}
	if n.Namespace != "" {
		attrs = append(attrs, slog.String("namespace", n.Namespace))
	}
	if n.Peer != "" {
		attrs = append(attrs, slog.String("peer", n.Peer))
	}
	log.LogAttrs(context.Background(), level, n.Text, attrs...)
}

// storeServer answers /health and /metrics.
func storeServer(s *store.Store, log *slog.Logger) (*http.Server, error) {
	reg := prometheus.NewRegistry()
	if err := reg.Register(storeCollector{s}); err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"status":"ok"}`+"\n") // to a client that is gone
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	mux.HandleFunc("/", func(w http.ResponseWriter, req *http.Request) {
		http.Error(w, fmt.Sprintf("%s %.80q is nothing here: a store answers GET /health and /metrics; engines use its --p2p-listen", req.Method, req.URL.Path), http.StatusNotFound)
	})
	return &http.Server{
		Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}, nil
}
