package main

import (
	"errors"
	"strings"
	"testing"
)

// A setting that was said and would do nothing is refused, wherever it was said; a default, an empty text and a stock
// engine's name never are.
func TestIdleSettingsRefused(t *testing.T) {
	t.Setenv("GOMAXPROCS", "2") // engines in this process leave it as it is
	const (
		noCache = "does nothing without a CPU cache (--cpu-cache SIZE)"
		noFiles = "does nothing without the tier of files (--tier fs)"
		noPeers = "does nothing without the tier of peers (--tier p2p)"
		noTurns = "does nothing without --bidirectional-kv-xfer"
	)
	for _, c := range []struct {
		args string
		env  string // NAME=VALUE
		file string
		says string // "": it starts
	}{
		{args: "engine --tier fs", says: "--tier fs " + noCache},
		{args: "engine --fs blocks", says: "--fs blocks " + noCache},
		{args: "engine --fs-size 5GiB", says: "--fs-size 5GiB " + noCache},
		{args: "engine --hash-seed ours", says: "--hash-seed ours " + noCache},
		{args: "engine --inject-tier-fault flip-bit", says: "--inject-tier-fault flip-bit " + noCache},
		{args: "engine --tier-timeout 5s", says: "--tier-timeout 5s " + noCache},
		{args: "engine --p2p-listen 127.0.0.1:0", says: "--p2p-listen 127.0.0.1:0 " + noCache}, // the default, but said
		{args: "engine --p2p-advertise h", says: "--p2p-advertise h " + noCache},
		{args: "engine --p2p-agent-listen 127.0.0.1:0", says: "--p2p-agent-listen 127.0.0.1:0 " + noCache},
		{args: "engine --p2p-store h:1", says: "--p2p-store h:1 " + noCache},
		{args: "engine --cpu-cache 0 --tier-timeout 5s", says: "--tier-timeout 5s " + noCache},
		{args: "engine --hash-seed ours --tier p2p", says: "--tier p2p, --hash-seed ours do nothing without a CPU cache"},
		{args: "engine --cpu-cache 1MiB --fs blocks", says: "--fs blocks " + noFiles},
		{args: "engine --cpu-cache 1MiB --fs-size 5GiB --tier p2p", says: "--fs-size 5GiB " + noFiles},
		{args: "engine --cpu-cache 1MiB --p2p-listen 127.0.0.1:0", says: "--p2p-listen 127.0.0.1:0 " + noPeers},
		{args: "engine --cpu-cache 1MiB --p2p-advertise h", says: "--p2p-advertise h " + noPeers},
		{args: "engine --cpu-cache 1MiB --p2p-agent-listen 127.0.0.1:0", says: "--p2p-agent-listen 127.0.0.1:0 " + noPeers},
		{args: "engine --cpu-cache 1MiB --p2p-store h:1", says: "--p2p-store h:1 " + noPeers},
		{args: "engine --mode pull --decoder-kv-blocks-ttl 10m", says: "--decoder-kv-blocks-ttl 10m0s " + noTurns},
		{args: "store --fs-size 5GiB", says: "--fs-size 5GiB does nothing without a folder (--fs DIR)"},
		{args: "engine", env: "KVFERRY_TIER_TIMEOUT=5s", says: "; --tier-timeout is from KVFERRY_TIER_TIMEOUT"},
		{args: "engine", file: "p2p_listen: 127.0.0.1:0\n", says: "; --p2p-listen is from engine.yaml:1: p2p_listen"},
		{args: "store", env: "KVFERRY_FS_SIZE=5GiB", says: "; --fs-size is from KVFERRY_FS_SIZE"},

		{args: "engine --listen 127.0.0.1:0"},
		{args: "engine --listen 127.0.0.1:0 --tier= --fs= --p2p-store="},
		{args: "engine --listen 127.0.0.1:0", env: "VLLM_P2P_SIDE_CHANNEL_PORT=5710"},
		{args: "engine --listen 127.0.0.1:0 --cpu-cache 1MiB", env: "VLLM_P2P_SIDE_CHANNEL_HOST=10.0.0.5"},
		{args: "engine --listen 127.0.0.1:0", file: "kv_transfer_config: {kv_connector_extra_config: {decoder_kv_blocks_ttl: 600}}\n"},
		{args: "engine --listen 127.0.0.1:0 --cpu-cache 1MiB --hash-seed ours --tier-timeout 5s --inject-tier-fault flip-bit"},
		{args: "engine --listen 127.0.0.1:0 --cpu-cache 1MiB --tier p2p --p2p-listen 127.0.0.1:0"},
		{args: "engine --listen 127.0.0.1:0 --mode pull --bidirectional-kv-xfer --decoder-kv-blocks-ttl 10m"},
	} {
		t.Run(c.args+" "+c.env+c.file, func(t *testing.T) {
			said, err := runSaid(t, strings.Fields(c.args), c.env, c.file)
			if c.says == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil {
				t.Fatal("it is not refused")
			}
			if usage := (*usageError)(nil); !strings.Contains(said, c.says) || !errors.As(err, &usage) || strings.Contains(said, "\n") {
				t.Errorf("%s\nwant %q, a refusal of one line", said, c.says)
			}
		})
	}
}
