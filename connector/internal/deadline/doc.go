// Package deadline holds an ordered set of deadlines, each with one owner that can move or remove
// it at any time. It never looks at a clock and starts no timer: a machine asks it for the next
// moment, and for what is due at the moment it was given.
//
//	Set(item, t) ─┐
//	Remove(item) ─┼─> heap ordered by (time, insertion) ──Next──> the one timer of the driver
//	PopDue(now) <─┘
//
// A Queue belongs to the goroutine that owns the machine around it; it does not block.
package deadline
