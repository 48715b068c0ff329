package api

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
)

// tieredEngine has a CPU tier with peers and files behind it.
func tieredEngine(t *testing.T) *rig {
	t.Helper()
	e, err := engine.New(engine.Config{Model: tiny(), NumBlocks: 64, Tier: engine.TierConfig{
		Memory: 4 << 20, Secondaries: []string{engine.TierP2P, engine.TierFS}, FSDir: t.TempDir(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	return serveEngine(t, e)
}

// metric is the value of one line of /metrics.
func (r *rig) metric(t *testing.T, line string) (value string) {
	t.Helper()
	_, all := r.do(t, "GET", "/metrics", "")
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(line) + ` (.*)$`).FindStringSubmatch(all)
	if m == nil {
		t.Fatalf("no %s in\n%s", line, all)
	}
	return m[1]
}

// becomes waits for a metric's value: blocks are copied beside the answers.
func (r *rig) becomes(t *testing.T, line, want string) {
	t.Helper()
	for deadline := time.Now().Add(patience); r.metric(t, line) != want; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("%s is %s, want %s", line, r.metric(t, line), want)
			return
		}
	}
}

// TestTierByHTTP: the second engine answers what the first has seen, and metrics say so.
func TestTierByHTTP(t *testing.T) {
	x, y := tieredEngine(t), tieredEngine(t)
	var at engine.Coordinates
	_, got := x.do(t, "GET", "/kv/coordinates", "")
	if err := json.Unmarshal([]byte(got), &at); err != nil || at.P2PAddress == "" {
		t.Fatal(got, err)
	}
	host, port, _ := strings.Cut(at.P2PAddress, ":")
	prompt := strings.Repeat("The ferry leaves at noon. ", 4)
	ask := func(r *rig, params string) openai.Completion {
		resp, got := r.do(t, "POST", "/v1/completions", fmt.Sprintf(
			`{"prompt":%q,"temperature":0,"max_tokens":4,"kv_transfer_params":%s}`, prompt, params))
		if resp.StatusCode != 200 {
			t.Fatal(got)
		}
		return completion(t, got)
	}
	first := ask(x, `null`)
	blocks := (len(prompt) - 1) / 16
	x.becomes(t, "kvferry_tier_blocks_ready", fmt.Sprint(blocks))
	second := ask(y, fmt.Sprintf(`{"remote_kv_source":{"kv_request_id":"a","remote_host":%q,"remote_port":%s}}`, host, port))
	if first.Choices[0].Text != second.Choices[0].Text {
		t.Errorf("%q and %q", first.Choices[0].Text, second.Choices[0].Text)
	}
	if got := second.Usage.PromptTokensDetails.CachedTokens; got != 16*blocks {
		t.Errorf("%d tokens are said to be cached, want %d", got, 16*blocks)
	}
	for line, want := range map[string]string{
		`vllm:kv_offload_tiering_chunk_hits{tier="1:p2p"}`:                  fmt.Sprint(blocks),
		`vllm:kv_offload_tiering_promotion_job_failures{tier="1:p2p"}`:      "0",
		`vllm:kv_offload_tiering_active_promotion_jobs{tier="1:p2p"}`:       "0",
		`vllm:kv_offload_tiering_primary_read_usage_perc{tier="0:primary"}`: "0",
		`kvferry_tier_fs_recovered_blocks`:                                  "0",
		`kvferry_tier_p2p_fetches_total`:                                    "1", `kvferry_tier_p2p_unchecked_blocks_total`: "0",
		`kvferry_tier_strays_total`:          "0",
		`kvferry_engine_tier_timeouts_total`: "0",
	} {
		y.becomes(t, line, want)
	}
	for _, line := range []string{"kvferry_engine_tier_loaded_tokens_total", "vllm:kv_offload_tiering_lookup_async_delay_seconds_count"} {
		if y.metric(t, line) == "0" {
			t.Errorf("%s is 0", line)
		}
	}
}

// TestTierOfSeveral: peers know one transaction, which is the first answer's; bounds are of all.
func TestTierOfSeveral(t *testing.T) {
	f := newFake(func(engine.Request) []engine.Output { return nil })
	s, err := newServer(Config{}, f)
	if err != nil {
		t.Fatal(err)
	}
	j := &job{n: 1, prompts: [][]kv.Token{{1}, {2}}}
	raw := `{"remote_decoder":{"kv_request_id":"a"},"max_load_tokens":5,"kv_load_tiers":[]}`
	if err := s.prepare(j, "", json.RawMessage(raw)); err != nil {
		t.Fatal(err)
	}
	for i, id := range []string{"a", ""} {
		if p := j.tierOf(i); p.Decoder != id || *p.MaxLoad != 5 || p.LoadTiers == nil {
			t.Errorf("%d: %+v", i, p)
		}
	}
}

// TestTierParams: wrong types are the client's fault, and named.
func TestTierParams(t *testing.T) {
	r := startEngine(t, "both") // one without a tier says the same
	for params, field := range map[string]string{
		`{"remote_decoder":5}`:                           "remote_decoder",
		`{"remote_prefiller":{"remote_port":"x"}}`:       "remote_prefiller.remote_port",
		`{"remote_kv_source":{"kv_request_id":7}}`:       "remote_kv_source.kv_request_id",
		`{"max_offload_tokens":-1}`:                      "max_offload_tokens",
		`{"max_load_tokens":"all"}`:                      "max_load_tokens",
		`{"kv_load_tiers":{}}`:                           "kv_load_tiers",
		`{"kv_load_tiers":[{"medium":1}]}`:               "kv_load_tiers[0].medium",
		`{"do_remote_decode":true,"max_load_tokens":[]}`: "max_load_tokens",
	} {
		resp, got := r.do(t, "POST", "/v1/completions", `{"prompt":"a","max_tokens":1,"kv_transfer_params":`+params+`}`)
		if resp.StatusCode != 400 || !strings.Contains(got, `"param":"kv_transfer_params.`+field+`"`) {
			t.Errorf("%s: %d %s", params, resp.StatusCode, got)
		}
	}
}
