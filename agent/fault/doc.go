// Package fault wraps any transfer agent and makes it fail on purpose, for the tests of what is
// built on agents.
//
//	user ── Post, Notify, AddPeer ──> rules ──> inner agent
//	user <── events ── rules <── pump goroutine <── inner agent's events
//
// A Rule says where it applies (Match), when (After, Times, Chance) and what happens (Do). The first
// rule that matches wins. Rules may be added while the agent runs. With no rules the wrapped agent
// is as good as the inner one: it passes the same conformance suite.
//
// What a rule can do, and where:
//
//	           Post  Notify  AddPeer  Result  Stopped  Notification  PeerLost
//	Fail        ×      ×        ×       ×
//	Delay       ×      ×        ×       ×        ×          ×            ×
//	Drop        ×      ×                                    ×
//	Stall       ×               ×
//	Duplicate          ×                                    ×
//	Reorder            ×                                    ×
//	Cut         ×      ×                ×                   ×
//	WriteLate   ×
//
// The contract of package agent holds under every fault: one Result and then one Stopped for each
// posted transfer, within its bound of silence unless Result or Stopped themselves are delayed; no
// notification of a peer behind its PeerLost. What a delayed or late transfer touches is not held
// against Deregister until it starts; if the memory is gone by then, it fails or writes nothing.
//
// With the same seed, rules, calls and events the same happens. Time goes through Options.After.
package fault
