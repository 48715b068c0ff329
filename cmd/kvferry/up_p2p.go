package main

import (
	"context"
	"encoding/json"
	"io"
)

// runUpRack runs two engines that share CPU caches until ctx ends or one of the processes dies, or
// checks them.
func runUpRack(ctx context.Context, w io.Writer, f upFlags) error {
	o := rackOptions{pair: f.pair, cpuCache: f.cpuCache, withStore: f.topology == topologyStore, faults: f.tierFaults}
	if err := o.check(); err != nil {
		return err
	}
	if f.check {
		return runRackCheck(ctx, w, f)
	}
	out := newLockedWriter(w)
	out.verbose = f.verbose
	listens, err := listensOf(f.listen)
	if err != nil {
		return err
	}
	for _, addr := range listens { // the trouble is told before processes start
		l, err := listen("--listen", addr)
		if err != nil {
			return err
		}
		_ = l.Close()
	}
	r, err := startRack(ctx, listens, o, out)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	if err := r.describe(); err != nil {
		_ = r.stop()
		return err
	}
	died := r.died(ctx)
	if died == nil {
		out.linef("stopping")
	}
	if err := r.stop(); died == nil {
		died = err
	}
	return died
}

// describe says where everything is and what to try.
func (r *rack) describe() error {
	request := struct {
		Model       string    `json:"model"`
		Prompt      string    `json:"prompt"`
		MaxTokens   int       `json:"max_tokens"`
		Temperature int       `json:"temperature"`
		KV          *kvSource `json:"kv_transfer_params,omitempty"`
	}{Model: r.first.ready["model"], Prompt: text(1, 100), MaxTokens: 32}
	first, err := json.Marshal(request)
	if err != nil {
		return err
	}
	if r.store == nil {
		if request.KV, err = sourceOf(r.first, "any-id"); err != nil {
			return err
		}
	}
	second, err := json.Marshal(request)
	if err != nil {
		return err
	}
	for _, e := range []*child{r.first, r.second} {
		r.out.linef("%s  %s  (pid %d), blocks at %s", e.name, e.ready["url"], e.cmd.Process.Pid, e.ready["p2p"])
	}
	if r.store != nil {
		r.out.linef("store     %s  (pid %d), blocks at %s", r.store.ready["url"], r.store.cmd.Process.Pid, r.store.ready["p2p"])
	}
	r.out.linef("")
	r.out.linef("try:   curl -s %s/v1/completions -d '%s'", r.first.ready["url"], first)
	r.out.linef("then:  curl -s %s/v1/completions -d '%s'", r.second.ready["url"], second)
	r.out.linef("ready up url=%s second=%s", r.first.ready["url"], r.second.ready["url"])
	return nil
}
