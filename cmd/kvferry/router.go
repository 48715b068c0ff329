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
	cfg             proxy.Config
	log             logFlags
}

func newRouter() *cobra.Command {
	var f routerFlags
	cmd := &cobra.Command{
		Use:   "router",
		Short: "Route requests to prefill and decode engines",
		Long: "Send each request to a prefill and a decode engine at once and answer with what the decode engine\n" +
			"gives. The router asks each prefill engine for its coordinates. It prints a line beginning with\n" +
			"`ready` when requests can be sent, and stops on SIGTERM or Ctrl-C.",
		Example: "  kvferry router --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002\n" +
			"  kvferry router --listen 127.0.0.1:9000 --prefill host1:8001 --prefill host2:8001 --decode host3:8002",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runRouter(cmd.Context(), cmd.OutOrStdout(), f) },
	}
	fl := cmd.Flags()
	fl.StringVar(&f.listen, "listen", "127.0.0.1:8000", "`HOST:PORT` to serve at; port 0 picks a free one")
	fl.StringArrayVar(&f.prefill, "prefill", nil, "`URL` of a prefill engine; may be given several times")
	fl.StringArrayVar(&f.decode, "decode", nil, "`URL` of a decode engine; may be given several times")
	fl.DurationVar(&f.cfg.ConnectTimeout, "connect-timeout", 5*time.Second, "how long a connection to an engine may take")
	fl.DurationVar(&f.cfg.FirstByteTimeout, "first-byte-timeout", 10*time.Minute, "how long an engine may take until it answers")
	fl.DurationVar(&f.cfg.IdleTimeout, "idle-timeout", 5*time.Minute, "how long an engine may be silent within an answer")
	fl.Int64Var(&f.cfg.MaxBody, "max-body", proxy.DefaultMaxBody, "largest request body in `BYTES`")
	fl.IntVar(&f.cfg.MaxInFlight, "max-in-flight", proxy.DefaultMaxInFlight, "most `REQUESTS` at a time; more are answered 429")
	fl.StringArrayVar(&f.cfg.ForwardHeaders, "forward-header", nil, "`NAME` of a client header that engines get too; may be given several times")
	fl.DurationVar(&f.drain, "drain", 10*time.Second, "how long requests in flight may go on after SIGTERM")
	f.log.add(fl)
	return cmd
}

func runRouter(ctx context.Context, w io.Writer, f routerFlags) error {
	log, err := f.log.logger(os.Stderr)
	if err != nil {
		return err
	}
	if len(f.prefill) == 0 || len(f.decode) == 0 {
		return usagef("router needs at least one --prefill URL and one --decode URL; see `kvferry router --help`")
	}
	for _, u := range f.prefill {
		f.cfg.Prefill = append(f.cfg.Prefill, proxy.Target{URL: u})
	}
	for _, u := range f.decode {
		f.cfg.Decode = append(f.cfg.Decode, proxy.Target{URL: u})
	}
	f.cfg.Log = log
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
	return serve(ctx, l, router.Server(), f.drain, nil)
}
