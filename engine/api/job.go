package api

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/engine"
	"github.com/kvferry/kvferry/engine/model"
	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/wire"
)

// job is one HTTP request as the engine will see it: a child request per answer. Children of one
// prompt are neighbours; child i answers prompt i/n.
type job struct {
	id       string // of the answer: without prompt index and suffix
	model    string // as asked for
	adapter  string // that it names; "" for the model itself
	n        int
	prompts  [][]kv.Token
	children []engine.Request
	output   openai.Output
	params   *kv.TransferParams // of the request
	tier     wire.P2PParams     // likewise
}

// completionJob turns a checked body into requests. Errors are for asAPIError.
func (s *Server) completionJob(name string, r *openai.CompletionRequest) (*job, error) {
	tok := s.engine.Tokenizer()
	prompts := make([][]kv.Token, len(r.Prompts))
	for i, p := range r.Prompts {
		if prompts[i] = p.Tokens; p.Tokens == nil {
			prompts[i] = tok.Encode(p.Text)
		}
	}
	j := &job{id: "cmpl-" + name, n: r.N, prompts: prompts, output: r.Output}
	if err := s.prepare(j, r.Model, r.KVTransferParams); err != nil {
		return nil, err
	}
	for i := range j.prompts {
		limit, err := s.tokenLimit(j.prompts[i], r.MaxTokens, openai.DefaultCompletionTokens, "prompt", "max_tokens")
		if err != nil {
			return nil, err
		}
		j.add(s.completionID(name, i), j.prompts[i], limit, r.Sampling)
	}
	return j, nil
}

// chatJob turns a checked body into requests. Errors are for asAPIError.
func (s *Server) chatJob(name string, r *openai.ChatRequest) (*job, error) {
	prompt := s.engine.Tokenizer().Encode(chatText(r.Messages))
	j := &job{id: "chatcmpl-" + name, n: r.N, prompts: [][]kv.Token{prompt}, output: r.Output}
	if err := s.prepare(j, r.Model, r.KVTransferParams); err != nil {
		return nil, err
	}
	limit, err := s.tokenLimit(j.prompts[0], r.MaxTokens, 0, "messages", "max_completion_tokens")
	if err != nil {
		return nil, err
	}
	j.add(s.chatID(name), j.prompts[0], limit, r.Sampling)
	return j, nil
}

// chatText is the prompt of a chat.
func chatText(messages []openai.Message) string {
	turns := make([]model.Message, len(messages))
	for i, m := range messages {
		turns[i] = model.Message{Role: m.Role, Content: m.Content}
	}
	return model.ChatPrompt(turns)
}

// prepare checks model and hand-off.
func (s *Server) prepare(j *job, asked string, rawParams json.RawMessage) error {
	info := s.engine.Model()
	switch {
	case asked == "" || asked == info.Name:
		j.model = info.Name
	case slices.Contains(info.Adapters, asked):
		j.model, j.adapter = asked, asked
	default:
		return &openai.Error{
			Status: 404, Type: openai.TypeNotFound, Param: "model", Code: openai.CodeModelNotFound,
			Message: "The model " + quote(asked) + " does not exist here; this engine serves " + quote(strings.Join(append([]string{info.Name}, info.Adapters...), ", ")) + ".",
		}
	}
	if rawParams == nil {
		return nil
	}
	p, err := wire.ParseTransferParams(rawParams)
	if err != nil {
		return err
	}
	if j.tier, err = wire.ParseP2PParams(rawParams); err != nil {
		return err
	}
	leg, err := wire.LegOf(&p)
	if err != nil {
		return err
	}
	if leg == wire.NoLeg {
		return nil
	}
	if err := wire.CheckLeg(&p, s.engine.Coordinates().TransferMode, leg); err != nil {
		return err
	}
	if leg == wire.DecodeLeg && len(p.PromptTokens) > 0 && len(j.prompts) == 1 {
		j.prompts[0] = p.PromptTokens // as P had them
	}
	if j.n*len(j.prompts) > 1 {
		p.TransferID = "" // it would name several requests
	}
	if leg == wire.PrefillLeg && p.RemoteEngineID == s.engine.Coordinates().EngineID && !s.mayRelease(p.RemoteRequestID, p.Lease, p.Release) {
		p.Lease = 0 // our own turn would be let go, which needs the token here as well
	}
	p.Readers = j.n
	j.params = &p
	return nil
}

func quote(s string) string {
	if len(s) > 100 {
		s = strings.ToValidUTF8(s[:100], "") + "…"
	}
	return "`" + s + "`"
}

// tokenLimit is the max_tokens of a prompt: what was asked, which must fit, else the default as far
// as there is room; a default of 0 is all the room.
func (s *Server) tokenLimit(prompt []kv.Token, asked, otherwise int, promptField, limitField string) (int, error) {
	most := s.engine.Model().MaxContext
	room := most - len(prompt)
	switch {
	case room < 1:
		return 0, invalid(promptField, openai.CodeTooLong,
			"%s has %d tokens; the context of %d has no room for an answer. Shorten it to %d.", promptField, len(prompt), most, most-1)
	case asked > room:
		return 0, invalid(limitField, openai.CodeTooLong,
			"%s is %d; the context of %d tokens has room for %d behind a prompt of %d.", limitField, asked, most, room, len(prompt))
	case asked > 0:
		return asked, nil
	case otherwise > 0:
		return min(otherwise, room), nil
	}
	return room, nil
}

// pulls tells whether the parameters name a peer's blocks. They are those of the first prompt; other
// prompts of the request are computed here. (A stock engine reads the same blocks for all of them,
// nixl-connector.md H9.)
func (j *job) pulls() bool { return j.params.RemoteBlockIDs.Len() > 0 }

// paramsOf are the parameters of a child; nil if it hands nothing over.
func (j *job) paramsOf(child int) *kv.TransferParams {
	if j.params == nil {
		return nil
	}
	own := *j.params
	if child >= j.n && j.pulls() {
		if own.DoRemotePrefill {
			return nil
		}
		own.RemoteBlockIDs, own.RemoteNumTokens, own.RemoteBlocksExpiry, own.Lease = nil, 0, nil, 0
	}
	return &own
}

// add makes the children of one prompt. Each answer has a seed of its own, or all would be alike.
func (j *job) add(parent kv.RequestID, prompt []kv.Token, limit int, p openai.Sampling) {
	for k := range j.n {
		r := engine.Request{
			ID: childID(parent, k, j.n), Prompt: prompt, MaxTokens: limit,
			Sampling: model.Sampling{
				Temperature: p.Temperature, TopP: p.TopP, TopK: p.TopK, Seed: randomSeed(),
			},
			StopStrings: p.Stop, StopTokens: p.StopTokens, IgnoreEOS: p.IgnoreEOS, CacheSalt: p.CacheSalt,
			Adapter: j.adapter,
		}
		if p.Seed != nil {
			r.Sampling.Seed = uint64(*p.Seed) + uint64(k)
		}
		r.Tier = j.tierOf(len(j.children))
		r.Params = j.paramsOf(len(j.children))
		j.children = append(j.children, r)
	}
}
