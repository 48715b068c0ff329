// Package local is a transfer agent for several parties in one process: tests, and whole clusters
// on a virtual clock. Agents of one Fabric reach each other; bytes are really copied, permissions
// really checked, and revocation is exact.
//
//	a := fabric.Agent("p")          Fabric (one mutex, no goroutines)
//	b := fabric.Agent("d")     p ══ link p→d: latency, bandwidth ══> d
//	                           p <═ link d→p ══════════════════════ d
//
// Everything that takes time goes through Config.After: with the default it runs on time.AfterFunc,
// so that a testing/synctest bubble's clock drives it; a simulation gives its own. A transfer costs
// no goroutine of this package and one pending timer for its next step plus one for its silence;
// an idle fabric has none.
//
// Faults: Partition stalls everything between two agents without telling them, as a cable pulled;
// Heal lets what waited go on; Cut resets their connections; Kill ends an agent as a dying process
// would.
package local
