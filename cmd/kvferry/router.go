package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/proxy"
)

// routerFlags is the command line of `kvferry router`.
type routerFlags struct {
	listen          string
	prefill, decode []string
	drain           time.Duration
	policy          string
	cfg             proxy.Config
	log             logFlags
}

func newRouter() *cobra.Command {
	var f routerFlags
	cmd := &cobra.Command{
		Use:   "router",
		Short: "Route requests to prefill and decode engines",
		Long: "Send each request to a prefill and a decode engine and answer with what the decode engine gives: in push\n" +
			"to both at once, in pull to the decode engine when the prefill engine has answered. The router asks the\n" +
			"engines for their mode and coordinates. Of a stock engine, which cannot be asked, they stand behind its\n" +
			"URL: mode=push|pull, and of a prefill engine that pushes engine-id=, side-channel=HOST:PORT, tp=, pp=.\n" +
			"It prints a line beginning with `ready` when requests can be sent, and stops on SIGTERM or Ctrl-C.",
		Example: "  kvferry router --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002\n" +
			"  kvferry router --listen 127.0.0.1:9000 --prefill host1:8001 --prefill host2:8001 --decode host3:8002\n" +
			"  kvferry router --prefill host1:8001,engine-id=p1,side-channel=host1:5600,tp=1,pp=1,mode=push --decode host2:8001\n" +
			"  kvferry router --prefill host1:8001,mode=pull --decode host2:8001",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runRouter(cmd.Context(), cmd.OutOrStdout(), f) },
	}
	fl := cmd.Flags()
	fl.StringVar(&f.listen, "listen", "127.0.0.1:8000", "`HOST:PORT` to serve at; port 0 picks a free one")
	fl.StringArrayVar(&f.prefill, "prefill", nil, "`URL[,KEY=VALUE]...` of a prefill engine; may be given several times")
	fl.StringArrayVar(&f.decode, "decode", nil, "`URL[,mode=MODE]` of a decode engine; may be given several times")
	fl.BoolVar(&f.cfg.Sequential, "sequential", false, "send the decode engine's leg when the prefill engine has answered, in push too; needs no coordinates")
	fl.StringVar(&f.policy, "prefill-failure-policy", "fail", "`POLICY` when a prompt's KV cannot be had: fail, or recompute it on the decode engine")
	fl.DurationVar(&f.cfg.ConnectTimeout, "connect-timeout", 5*time.Second, "how long a connection to an engine may take")
	fl.DurationVar(&f.cfg.FirstByteTimeout, "first-byte-timeout", 10*time.Minute, "how long an engine may take until it answers")
	fl.DurationVar(&f.cfg.IdleTimeout, "idle-timeout", 5*time.Minute, "how long an engine may be silent within an answer")
	fl.DurationVar(&f.cfg.ConversationTTL, "conversation-ttl", 450*time.Second, "how long to remember what a decode engine keeps of a conversation; less than the engines' --decoder-kv-blocks-ttl")
	fl.Int64Var(&f.cfg.MaxBody, "max-body", proxy.DefaultMaxBody, "largest request body in `BYTES`")
	fl.IntVar(&f.cfg.MaxInFlight, "max-in-flight", proxy.DefaultMaxInFlight, "most `REQUESTS` at a time; more are answered 429")
	fl.StringArrayVar(&f.cfg.ForwardHeaders, "forward-header", nil, "`NAME` of a client header that engines get too; may be given several times")
	fl.DurationVar(&f.drain, "drain", 10*time.Second, "how long requests in flight may go on after SIGTERM")
	f.log.add(fl)
	return cmd
}

// checkNumbers refuses a 0 that proxy.Config would take for "the default".
func (f *routerFlags) checkNumbers() error {
	switch {
	case f.cfg.MaxBody == 0:
		return usagef("--max-body is 0, must be more")
	case f.cfg.MaxInFlight == 0:
		return usagef("--max-in-flight is 0, must be more")
	}
	return checkDrain(f.drain)
}

func runRouter(ctx context.Context, w io.Writer, f routerFlags) error {
	log, err := f.log.logger(os.Stderr)
	if err != nil {
		return err
	}
	if len(f.prefill) == 0 || len(f.decode) == 0 {
		return usagef("router needs at least one --prefill URL and one --decode URL; see `kvferry router --help`")
	}
	switch f.policy {
	case "fail", "recompute":
		f.cfg.Recompute = f.policy == "recompute"
	default:
		return usagef("--prefill-failure-policy %q is unknown, use fail or recompute", f.policy)
	}
	for _, s := range f.prefill {
		t, err := parseTarget("prefill", s)
		if err != nil {
			return err
		}
		f.cfg.Prefill = append(f.cfg.Prefill, t)
	}
	for _, s := range f.decode {
		t, err := parseTarget("decode", s)
		if err != nil {
			return err
		}
		f.cfg.Decode = append(f.cfg.Decode, t)
	}
	f.cfg.Log = log
	if err := f.checkNumbers(); err != nil {
		return err
	}
	if err := f.cfg.Validate(); err != nil {
		return &usageError{err}
	}
	l, err := listen("--listen", f.listen)
	if err != nil {
		return err
	}
	router, err := proxy.New(f.cfg)
	if err != nil {
		_ = l.Close()
		return err
	}
	fmt.Fprintf(w, "ready router url=http://%s\n", l.Addr())
	defer router.Close()
	return serve(ctx, log, l, router.Server(), f.drain, nil)
}
