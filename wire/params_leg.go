package wire

import "github.com/kvferry/kvferry/kv"

// Leg says which part of a request an engine is asked for.
type Leg string

const (
	// NoLeg: an ordinary request, nothing to hand over.
	NoLeg Leg = "none"
	// PrefillLeg: "you are P", do_remote_decode.
	PrefillLeg Leg = "prefill"
	// DecodeLeg: "you are D", do_remote_prefill.
	DecodeLeg Leg = "decode"
)

// LegOf tells the leg from the two flags. Both together are an error.
func LegOf(p *kv.TransferParams) (Leg, error) {
	switch {
	case p.DoRemoteDecode && p.DoRemotePrefill:
		return NoLeg, &ParamError{"do_remote_prefill", "is set together with do_remote_decode"}
	case p.DoRemoteDecode:
		return PrefillLeg, nil
	case p.DoRemotePrefill:
		return DecodeLeg, nil
	}
	return NoLeg, nil
}

// CheckLeg reports the first key that an engine in the given mode needs for the leg and p lacks, as
// a *ParamError. Stock engines die of most of these, so a router calls it before it sends a body,
// and an engine before it plans anything.
//
//	push, decode   remote_engine_id, remote_request_id, remote_host, remote_port, tp_size
//	pull, decode   remote_engine_id, remote_request_id, remote_host, remote_port, remote_block_ids
//	pull, prefill  the same if remote_block_ids is given (second turn of a conversation)
//	push, prefill  nothing more
//
// Where tp_size is not needed, an absent one (0) means 1.
func CheckLeg(p *kv.TransferParams, mode kv.TransferMode, leg Leg) error {
	got, err := LegOf(p)
	if err != nil {
		return err
	}
	missing := func(field string) error {
		return &ParamError{field, "is missing; the " + string(mode) + " " + string(leg) + " leg needs it"}
	}
	switch {
	case leg == PrefillLeg && got != leg:
		return missing("do_remote_decode")
	case leg == DecodeLeg && got != leg:
		return missing("do_remote_prefill")
	case leg == DecodeLeg && mode == kv.Push && p.TPSize == 0:
		return firstMissing(p, missing, "tp_size")
	case leg == DecodeLeg && mode == kv.Pull && p.RemoteBlockIDs.Len() == 0:
		return firstMissing(p, missing, "remote_block_ids")
	case leg == DecodeLeg, leg == PrefillLeg && mode == kv.Pull && p.RemoteBlockIDs.Len() > 0:
		return firstMissing(p, missing, "")
	}
	return nil
}

// firstMissing reports the first absent key of the peer's address, else last if it names a key.
func firstMissing(p *kv.TransferParams, missing func(string) error, last string) error {
	switch {
	case p.RemoteEngineID == "":
		return missing("remote_engine_id")
	case p.RemoteRequestID == "":
		return missing("remote_request_id")
	case p.RemoteHost == "":
		return missing("remote_host")
	case p.RemotePort == 0:
		return missing("remote_port")
	case last != "":
		return missing(last)
	}
	return nil
}
