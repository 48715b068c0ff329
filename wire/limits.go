package wire

const (
	// MaxHandshakePayload bounds a payload and the metadata in it, bytes. The largest real part is the
	// agent blob (hundreds of bytes of UCX addresses per device); lists of MaxRegions entries fit.
	MaxHandshakePayload = 16 << 20

	// MaxHandshakeRequest bounds a side-channel request, bytes. A real one has 17 to 31; the rest is
	// room for an odd magic.
	MaxHandshakeRequest = 1 << 10

	// MaxNotification bounds any notification, bytes: MaxBlocks ids of 5 bytes and some strings.
	MaxNotification = 8 << 20

	// MaxParamsJSON bounds a kv_transfer_params object, bytes: a prompt of a million token ids fits.
	MaxParamsJSON = 16 << 20

	// MaxIDLen bounds request, engine and transfer ids, bytes. Request ids contain the client's
	// X-Request-Id, which HTTP servers bound at a few KiB.
	MaxIDLen = 4 << 10

	// MaxHostLen bounds a host name, bytes. DNS allows 253, a zone id of IPv6 may follow.
	MaxHostLen = 320

	// MaxText bounds any other text of a message, bytes: layer names, backend names, layouts.
	MaxText = 64 << 10

	// MaxHashLen bounds the compatibility hash, bytes. A real one has 64.
	MaxHashLen = 256

	// MaxRegions bounds each per-region list of the metadata. One region per layer is the rule, so real
	// lists have at most some hundred entries; the stock encoder's vectors reach 65536.
	MaxRegions = 64 << 10

	// MaxRegionMembers bounds the layers of all regions together.
	MaxRegionMembers = 64 << 10

	// MaxGroups bounds KV-cache groups in a block list. Real models have fewer than ten.
	MaxGroups = 1 << 10

	// MaxBlocks bounds the block ids of one request, all groups together: 16 million tokens in blocks
	// of 16.
	MaxBlocks = 1 << 20

	// MaxPromptTokens bounds prompt_token_ids.
	MaxPromptTokens = 1 << 22

	// MaxTokens bounds token positions and counts, so that sums of two fit an int32 twice over.
	MaxTokens = 1 << 30

	// MaxRanks bounds TP, PP, DCP and PCP sizes and completion counts. Real ones are below 1024.
	MaxRanks = 64 << 10

	// MaxHeartbeatIDs bounds the requests of one heartbeat. A D has at most some thousand requests that
	// wait for one P; a sender with more sends several heartbeats.
	MaxHeartbeatIDs = 64 << 10

	// MaxAgents bounds the agents of one engine rank's extension: one per transport.
	MaxAgents = 16

	// MaxAgentBlob bounds one agent's own metadata in the extension, bytes.
	MaxAgentBlob = 1 << 20

	// MaxCapabilities bounds the capability names of the extension.
	MaxCapabilities = 64

	// MaxName bounds the instance, host, transport and capability names of the extension, bytes.
	MaxName = 256

	// MaxReleaseToken bounds kvferry_release, bytes: a hash in hexadecimal.
	MaxReleaseToken = 128

	// maxSkipDepth bounds the nesting of a value that is skipped. The stock decoder gives up near 1000.
	maxSkipDepth = 128

	// maxJSONDepth bounds the nesting of kv_transfer_params: known keys need 3.
	maxJSONDepth = 64
)
