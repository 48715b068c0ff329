// Package agenttest is the conformance suite of transfer agents: each line of the contract in
// package agent's documentation is a test here, and every backend passes all of them.
//
//	backend's test ─ Run(t, Factory, Options) ─> one subtest per line of the contract
//	                                              │ Net.New, Net.Stall, Net.Kill
//	                                              └─ node: an agent, the reader of its events,
//	                                                 and at the end the check of all of them
//
// Besides what each test looks for, every agent's whole event log is checked when the test ends:
// one Result and then one Stopped for each posted transfer and for nothing else, at most one
// PeerLost per peer, and nothing of a peer behind its PeerLost.
package agenttest
