// Package wire holds every message of the NIXL connector protocol that crosses a wire: its Go type,
// an appender and a strict decoder. It has no state, no I/O, no clock and no goroutines; every
// function may be called from any goroutine and none blocks.
//
//	message            bytes                                         direction
//	-----------------  --------------------------------------------  -------------------------------
//	HandshakeRequest   msgpack [bin magic, pp, tp]                   worker -> peer's side channel
//	HandshakePayload   msgpack map of 2, first reply frame           side channel -> worker
//	AgentMetadata      msgpack map inside the payload (19/20/21 keys side channel -> worker
//	                   for versions 12/13/14, plus "kvferry")
//	clock              msgpack float64, second reply frame           side channel -> worker
//	PushReg            "PUSH_REG:" msgpack map of 11 keys and more   D -> P, notification
//	Heartbeat          "HB:" ids joined by ','                       D -> P, notification
//	PushFail           "PUSH_FAIL:" id ':' P's TP size               P -> D, notification
//	Beat, Cancel,      "KVFERRY:" msgpack map                        D -> P, notification
//	Claim, ReadDone
//	States, Failed,    "KVFERRY:" msgpack map                        P -> D, notification
//	Claimed
//	Ack                "KVFERRY:" msgpack map                        either way, notification
//	Completion         id ':' n                                      push P -> D, pull D -> P
//	CompatFactors      SHA-256 of canonical JSON, in the payload     side channel -> worker
//	TransferParams     JSON object kv_transfer_params                router <-> engine
//
// Messages of the P2P tier, each one msgpack map in one frame of a DEALER to the peer's ROUTER:
//
//	P2PConnect         peer, agent, memory, model facts, "kvferry"   both ways, first
//	P2PConnectAck      peer: it may send                             both ways
//	P2PDisconnect      nothing                                       either way, last
//	P2PLookup          id, keys, round                               consumer -> source
//	P2PLookupResp      id, keys, hits                                source -> consumer
//	P2PFetch           id, keys, block indexes, round, "kvferry"     consumer -> source
//	P2PTransferDone    id, success, round, "kvferry"                 source -> consumer
//	P2PAbortFetch      id, round                                     consumer -> source
//	P2PAbortAck        id, round                                     source -> consumer
//	P2POffer           keys; to kvferry nodes that are stores        node -> store
//
// What is under "kvferry" there: Extension, a fetch's grant, a transfer's checksums. It goes to kvferry nodes
// only. P2PParams is what a request says of it in kv_transfer_params.
//
// Sources: nixl-connector.md sections 2.2, 2.3, 2.6, 5, 8.1; p2p-tier.md section 3. The tests compare with bytes captured
// from stock engines (testdata).
//
// # What proves a peer
//
// Nothing does by itself: names, ids and numbers are public, and whoever reaches an agent may say them. A
// control message counts because of what only the two peers have seen of each other: the key "token" (bin of
// 16), which PUSH_REG has in its "kvferry" and a Claim in itself, and which comes with every reference to one of
// them (in lists behind id and generation); and the key "receipt" (bin of 16) of Cancel and Failed, which their Ack
// brings back. Stock messages (Heartbeat, Completion, PushFail) have no room for it.
//
// # What decoders promise
//
// A decoder never panics, never recurses with its input, and allocates at most a small multiple of
// the bytes it was given: counts in headers are checked against the bytes that follow before
// anything is allocated. Its result shares no memory with its input. Unknown keys are skipped, of
// duplicate keys the last one counts, str and bin are told apart, an int is neither a float nor a
// bool. Bytes behind the message are refused. Errors are *DecodeError or, for the JSON parameters,
// *ParamError; both name the field.
//
// Where a decoder is stricter than the stock one its comment says so.
package wire
