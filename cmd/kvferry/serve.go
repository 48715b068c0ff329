package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"syscall"
	"time"
)

// lastWords is how long answers that ended with the drain may take to reach their clients.
const lastWords = time.Second

// listen binds a server's address, or says in one line which address is the trouble.
func listen(flag, addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, cannotListen(flag, addr, err)
	}
	return l, nil
}

// cannotListen says what is wrong with an address that err kept from being listened at.
func cannotListen(flag, addr string, err error) error {
	host, _, form := net.SplitHostPort(addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s %s is in use by another program; choose another port, or port 0 for any free one", flag, addr)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return usagef("%s %s: %s is none of this host's addresses; give one of them, or 127.0.0.1 for this host alone", flag, addr, host)
	case errors.Is(err, syscall.EACCES):
		return usagef("%s %s: not allowed to listen there; choose a port of 1024 or more", flag, addr)
	case form != nil:
		return usagef("%s %s: %v; give HOST:PORT", flag, addr, err)
	}
	return usagef("%s %s: %v", flag, addr, err)
}

// listenAt is an address of a flag at which a command is to listen.
type listenAt struct{ flag, addr string }

// checkDistinct refuses one port for two purposes: the second would find it in use, by the command itself.
func checkDistinct(all ...listenAt) error {
	flags := map[string]string{}
	for _, a := range all {
		if _, port, err := net.SplitHostPort(a.addr); err != nil || port == "0" || port == "" {
			continue // told elsewhere, or any free one
		}
		if other, ok := flags[a.addr]; ok {
			return usagef("%s and %s are both %s; give each a port of its own", other, a.flag, a.addr)
		}
		flags[a.addr] = a.flag
	}
	return nil
}

// checkDrain refuses what is no time to stop in.
func checkDrain(d time.Duration) error {
	if d < 0 {
		return usagef("--drain is %v, must not be negative", d)
	}
	return nil
}

// serve answers HTTP on l until ctx ends, then stops, which takes drain at most. stop is called first
// with that bound, for what is behind the server, and refuses requests from then on; until it
// returns, HTTP goes on, so that clients and routers are told. It may be nil. Then no new
// connections are taken, and what is in flight ends. A connection that is left after all is cut.
func serve(ctx context.Context, log *slog.Logger, l net.Listener, srv *http.Server, drain time.Duration, stop func(context.Context) error) error {
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(l) }()
	var fault error
	select {
	case err := <-failed:
		fault = fmt.Errorf("serving on %s: %w", l.Addr(), err)
	case <-ctx.Done():
		log.Info("stopping; a second signal ends it at once", "within", drain)
	}
	end := time.Now().Add(drain)
	var stopErr error
	if stop != nil {
		bound, cancel := context.WithDeadline(context.Background(), end)
		defer cancel()
		stopErr = stop(bound)
	}
	answered, cancel := context.WithDeadline(context.Background(), end.Add(lastWords))
	defer cancel()
	if srv.Shutdown(answered) != nil {
		_ = srv.Close()
	}
	return errors.Join(fault, stopErr)
}
