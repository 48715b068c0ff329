// Package geometry computes which bytes of which rank go where: descriptor rows of prepared lists,
// index lists of one transfer, ranges of one grant. It is pure: functions of layouts and block ids,
// without state, I/O, clock or goroutines.
//
//	local Layout ──Rows──> prepared list        remote Layout ──Rows──> prepared list
//	                            ▲                                            ▲
//	                            │ Plan.Local[i]  ── one descriptor ──  Plan.Remote[i]
//	P's Have ─┐                 │                                            │
//	          ├─ pair by absolute token position ── kernel blocks ───────────┘
//	D's Want ─┘
//
// # Pairing
//
// A block of D and a block of P belong together when they hold the same tokens of the prompt, never
// because they stand at the same place in two lists. A kvferry registration says at which token its
// first block begins. A stock one does not; its blocks end with the block of the prompt's last
// token, so P's list is first cut to the tokens of the prompt, and then the two ends are at the
// same token (nixl-connector.md, sections 3.6 and 6.8, and H4 for what the cut prevents).
//
// # What is refused
//
// This package covers one KV-cache group of full attention and equal tensor-parallel sizes. A peer
// of another shape is refused by Check with a *MismatchError that names both sides' values, lists
// that do not fit a request by PlanWrite or PlanRead with a *PairError, ids beyond a region with a *RangeError.
// Nothing is cut to fit: each descriptor that D wants is in the plan, or there is no plan.
package geometry
