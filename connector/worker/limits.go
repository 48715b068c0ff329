package worker

import "time"

const (
	// maxConnections bounds the connections that are told apart by which peers have reached us under one
	// agent's name: its own, and those of strangers who say it.
	maxConnections = 1 << 6

	// maxReceives bounds D's receives; a ledger keeps no more hand-offs than this. A registration
	// beyond it is reported as failed at once.
	maxReceives = 1 << 16

	// maxHolds bounds P's finished requests, for the same reason. Blocks beyond it are given back at
	// once, undelivered.
	maxHolds = 1 << 16

	// maxInbox is how many entries may wait for the writer before those that need no answer are left
	// out: every hand-off of a full ledger may have four. It takes a writer that has stopped to get
	// there.
	maxInbox = 4 * maxReceives

	// maxRegistrations bounds the registrations that wait for P's blocks, maxPerSender those of one D
	// agent. The oldest of the sender, else the oldest of all, makes room; its D is told.
	maxRegistrations = 1 << 15
	maxPerSender     = 1 << 12

	// maxRegistrationBlocks bounds the block ids in waiting registrations, maxSenderBlocks those of one
	// D agent: 64 MiB and 16 MiB of ids.
	maxRegistrationBlocks = 1 << 24
	maxSenderBlocks       = 1 << 22

	// maxSenders bounds the D agents whose registrations are remembered. Fleets have hundreds of
	// engines; a sender without a waiting registration makes room.
	maxSenders = 1 << 13

	// replayWindow is how far behind a sender's newest registration an older one may arrive and still
	// be taken. Agents deliver in order, so that what is further behind can only be a replay.
	replayWindow = 1 << 10

	// stockMemory is how many ids of a stock sender, which has no generations, are remembered to tell
	// a second copy of a registration.
	stockMemory = 1 << 8

	// maxNotes bounds the ended requests of P that a late registration is still told of. The oldest is
	// forgotten, and its D waits for its own watchdog.
	maxNotes = 1 << 14

	// maxNotices bounds what waits for handshakes with peers to be told, and as much again of our own
	// ledger; maxNoticesPerAgent bounds that of one agent, so that a stranger does not take the room of
	// others. What is beyond is not sent; D asks with its next beat.
	maxNotices         = 1 << 10
	maxNoticesPerAgent = 1 << 8

	// maxRemotes bounds the peers whose geometry is kept; peer.Table has no more by default.
	maxRemotes = 1 << 12

	// maxHeartbeatIDs bounds the ids of one heartbeat message: 256 ids of some 50 bytes fit any
	// transport's notification.
	maxHeartbeatIDs = 256

	// maxLetters bounds the letters to one agent that wait for an acknowledgement. Beyond it the oldest
	// goes: its peer does not listen, and has deadlines of its own.
	maxLetters = 1 << 9

	// maxLetterTries is how often a cancel or failure is sent, a heartbeat interval apart: as long as
	// D's patience with a silent P, and one more.
	maxLetterTries = 4

	// maxRegistrationTries is how often a registration is sent that P does not acknowledge.
	maxRegistrationTries = 4

	// maxClaimTries is how often P is asked for its blocks, a heartbeat interval apart, before a read
	// fails: its answer is one turn of its writer away, whatever its engine does.
	maxClaimTries = 4

	// maxPrefills bounds P's requests that are known before they end. A ledger has no more; the state
	// of one beyond is not told.
	maxPrefills = 1 << 16

	// busyRetry is when a transfer that the agent had no room for is tried again if no transfer of
	// this worker is in flight whose end would tell.
	busyRetry = 20 * time.Millisecond

	// backstop is how much longer than the registration timeout a rank of D waits for silence to end.
	// The ledger's watchdog comes first and cancels; this one works when nobody does.
	backstop = time.Minute

	// maxRanks bounds TP x PP, as the ledger does.
	maxRanks = 1 << 12
)
