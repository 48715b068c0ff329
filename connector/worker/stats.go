package worker

// Stats is a worker's counters since New and its sizes now, for metrics and tests.
type Stats struct {
	// D
	RegistrationsSent uint64
	Received          uint64 // receives with all KV in place
	ReceivesFailed    uint64
	HeartbeatsSent    uint64 // messages, beats included

	RegistrationsRepeated uint64 // P had not acknowledged them
	CancelsSent           uint64
	ClaimsSent            uint64 // copies included
	ReadsDeclined         uint64 // not begun, because D gives the blocks back too soon
	PeersSilent           uint64 // receives that failed because nothing was heard of P
	Quarantines           uint64 // receives whose blocks had to wait for P's word

	// P
	RegistrationsReceived uint64
	RegistrationsRefused  uint64 // they could never be served
	RegistrationsDropped  uint64 // ended without a match, for whatever reason
	Matched               uint64
	TransfersPosted       uint64 // WRITEs of P; in pull, READs of D; so for the next two
	TransfersDone         uint64
	TransfersFailed       uint64 // not posted, or not ended well
	BytesSent             uint64
	LeasesTaken           uint64
	LeasesExpired         uint64
	HoldsGivenUp          uint64 // our ledger said that nobody will ask for them
	StrayReleases         uint64 // it said so of holds that had ended
	FailuresSent          uint64 // PUSH_FAIL or the control message
	CancelsReceived       uint64
	ClaimsReceived        uint64
	ClaimsRefused         uint64
	AfterExpiry           uint64 // completions for requests that are not held any more
	StatesSent            uint64 // messages

	// Both
	Wakeups             uint64 // of the writer
	Ignored             uint64 // notifications nobody waits for, or that cannot be read
	NotificationsFailed uint64
	Forged              uint64 // of Ignored: messages that say a peer's name without the token that it was given
	LettersLost         uint64 // cancels and failures that were never acknowledged

	// Now
	Receiving         int // D: registrations without an end
	Quarantined       int // D: ended ones whose blocks P may still write
	QuarantinedBlocks int // D: blocks of them
	Letters           int // cancels and failures that wait for an acknowledgement
	Prefills          int // P: requests that have not ended
	Held              int // P: finished requests under a lease
	Claims            int // P: requests of D's that read them, or have
	Waiting           int // P: registrations that wait for blocks
	WaitingBlocks     int // block ids in them
	InFlight          int // transfers that have not stopped
	Senders           int // P: D agents remembered
	Notes             int // P: ended requests remembered
}

func (m *machine) snapshot() Stats {
	s := m.stats
	s.Receiving = len(m.consumer.receives) - m.consumer.quarantined + len(m.fetcher.fetches)
	s.Quarantined, s.QuarantinedBlocks = m.consumer.quarantined, m.consumer.quarantinedBlocks
	for _, x := range m.letters.byName {
		s.Letters += len(x.letters)
	}
	s.Prefills = len(m.producer.prefills)
	s.Held = len(m.producer.holds)
	s.Waiting = m.producer.order.Len()
	s.WaitingBlocks = m.producer.ids
	s.Claims = len(m.lender.claims)
	s.InFlight = len(m.producer.transfers) + len(m.fetcher.transfers)
	s.Senders = len(m.producer.senders)
	s.Notes = m.producer.noteOrder.Len()
	return s
}
