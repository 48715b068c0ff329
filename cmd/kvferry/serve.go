package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

// lastWords is how long answers that ended with the drain may take to reach their clients.
const lastWords = time.Second

// listen binds a server's address, or says in one line which address is the trouble.
func listen(flag, addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	switch {
	case err == nil:
		return l, nil
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s %s is in use by another program; choose another port, or port 0 for any free one", flag, addr)
	}
	return nil, usagef("%s %s: %v; give HOST:PORT", flag, addr, err)
}

// serve answers HTTP on l until ctx ends, then stops: no new connections, at most drain for what is
// in flight. stop is called at the same time with that bound, for what is behind the server; it may
// be nil. A connection that is left after all is cut.
func serve(ctx context.Context, l net.Listener, srv *http.Server, drain time.Duration, stop func(context.Context) error) error {
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(l) }()
	var fault error
	select {
	case err := <-failed:
		fault = fmt.Errorf("serving on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	bound, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	answered, cancelAnswered := context.WithTimeout(context.Background(), drain+lastWords)
	defer cancelAnswered()
	var wg sync.WaitGroup
	wg.Go(func() {
		if srv.Shutdown(answered) != nil {
			_ = srv.Close()
		}
	})
	var stopErr error
	if stop != nil {
		stopErr = stop(bound)
	}
	wg.Wait()
	return errors.Join(fault, stopErr)
}
