// Command kvferry runs engines, routers, and a pair of them on one machine.
//
//	kvferry up      ─┬─ kvferry engine --role prefill   (a process each)
//	                 ├─ kvferry engine --role decode
//	                 └─ kvferry router
//
// What commands run is in the packages engine, engine/api and proxy; here is read how:
//
//	command line ─┐ (settings.go)
//	environment ──┼──> flags ──> a package's Config      docs/configuration.md is generated
//	YAML file ────┘                                       from the flags (configdoc_test.go)
//
// `kvferry checkpoint` writes the built-in model for stock engines. stock_live_test.go, which
// test/interop/checkpoint.sh runs, compares one with an engine of ours.
//
// A server prints one line beginning with `ready` when requests can be sent, and stops on SIGTERM.
//
// `up --check` compares a pair with a single engine, token by token. `up --check --faults` does so
// while the pair is under fire: firecheck_schedule.go plans requests and faults from a seed,
// firecheck_site.go holds the processes and the relays between them and does to them what the plan
// says, firecheck_verdict.go judges each answer, and firecheck.go runs it all.
//
// One goroutine sends signals and cuts connections; the clients have one each. A child's pipes are
// read by goroutines that end with the child.
package main
