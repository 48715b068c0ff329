package core

import (
	"encoding/json"
	"strconv"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
)

// limits are the fields that bound an answer, by any name that an engine may know.
var tokenLimits = []string{"max_tokens", "max_completion_tokens", "max_output_tokens"}

// notForPrefill are fields that are invalid, wasted or harmful in a leg that answers one token which
// nobody reads. Stop settings stay: whether the first token ends the answer is decided alike on both
// engines.
var notForPrefill = []string{
	"stream_options", "min_tokens", "min_completion_tokens", "logprobs", "top_logprobs", "best_of",
	"return_token_ids", "return_tokens_as_token_ids",
}

// PrefillBody is P's leg: the client's body, for one token and not streamed, with the order to keep
// the KV (nixl-connector.md, section 8.3).
//
// A completion always gets max_tokens, because engines ignore the other names there: a P that
// generates more than one token hands over a block that D never asked for (section 14).
//
// earlier, if D has kept anything of an earlier turn, goes along as D said it.
func PrefillBody(api API, client *openai.Object, id kv.TransferID, earlier Turn) []byte {
	o := client.Clone()
	one := []byte("1")
	capped := false
	for _, name := range tokenLimits {
		if o.Raw(name) != nil {
			o.Set(name, one)
			capped = true
		}
	}
	if !capped || api == Completions {
		o.Set("max_tokens", one)
	}
	for _, name := range notForPrefill {
		o.Delete(name)
	}
	if o.Raw("n") != nil {
		o.Set("n", one)
	}
	o.Set("stream", []byte("false"))
	if earlier.Kept() {
		o.Set("kv_transfer_params", earlier.withTransferID(id))
		return o.Bytes()
	}
	params := []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
		`"remote_block_ids":null,"remote_host":null,"remote_port":null,"transfer_id":`)
	o.Set("kv_transfer_params", append(appendString(params, string(id)), '}'))
	return o.Bytes()
}

// DecodeBody is D's leg: the client's body with P's coordinates and the ids of this attempt.
func DecodeBody(client *openai.Object, p Peer, request kv.RequestID, id kv.TransferID) []byte {
	o := client.Clone()
	b := []byte(`{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":`)
	b = appendString(b, string(p.EngineID))
	b = append(b, `,"remote_host":`...)
	b = appendString(b, p.Host)
	b = append(b, `,"remote_port":`...)
	b = strconv.AppendInt(b, int64(p.Port), 10)
	b = append(b, `,"tp_size":`...)
	b = strconv.AppendInt(b, int64(p.TPSize), 10)
	b = append(b, `,"pp_size":`...)
	b = strconv.AppendInt(b, int64(p.PPSize), 10)
	b = append(b, `,"remote_request_id":`...)
	b = appendString(b, string(request))
	b = append(b, `,"transfer_id":`...)
	b = appendString(b, string(id))
	o.Set("kv_transfer_params", append(b, '}'))
	return o.Bytes()
}

// HandoffBody is D's leg in pull: the client's body with the parameters that P has answered with, to the
// byte, so that keys that this router does not know reach D.
func HandoffBody(client *openai.Object, handoff []byte) []byte {
	o := client.Clone()
	o.Set("kv_transfer_params", handoff)
	return o.Bytes()
}

// AloneBody is the leg of a request that D serves alone.
func AloneBody(client *openai.Object) []byte {
	o := client.Clone()
	o.Delete("kv_transfer_params") // it can only be null here
	return o.Bytes()
}

func appendString(dst []byte, s string) []byte {
	q, err := json.Marshal(s)
	if err != nil { // a string cannot fail to marshal
		panic(err)
	}
	return append(dst, q...)
}
