// Package event holds the typed events by which everything inside kvferry is seen.
//
//	peer, connector/worker, connector/scheduler ──Emit──> Sink ─┬─ log
//	                                                            ├─ metrics
//	                                                            └─ tests, recorder
//
// An event is plain data about something that has already happened. Emitters never depend on what
// a sink does. The sinks live with their users: a program writes its log line in its own package,
// and tests subscribe to the same events.
package event
