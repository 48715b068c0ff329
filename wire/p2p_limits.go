package wire

const (
	// MaxP2PMessage bounds a control message of the P2P tier, bytes: MaxP2PKeys keys of 36 bytes with
	// their indexes take some 6 MiB.
	MaxP2PMessage = 16 << 20

	// MaxP2PKeys bounds the keys of one message. A prompt of a million tokens in chunks of 16 has 64 Ki
	// for each of a few groups.
	MaxP2PKeys = 128 << 10

	// MaxP2PKeyLen bounds one key, bytes: a hash of at most 64 and the group's four, with room.
	MaxP2PKeyLen = 128

	// MaxP2PMetadata bounds the agent's blob in a connect, bytes: real ones have some hundred bytes for
	// each network device.
	MaxP2PMetadata = 1 << 20

	// MaxP2PSeed bounds the hash seed and the fingerprint, bytes: real ones have 64 and 16.
	MaxP2PSeed = 1 << 10

	// MaxP2PBlocks bounds num_blocks of a peer: 2^31 blocks of one page
	// are 8 TiB.
	MaxP2PBlocks = 1<<31 - 1

	// MaxP2PBlockLen bounds block_len, bytes. The largest known chunk has 4 MiB.
	MaxP2PBlockLen = 1 << 40

	// P2PGrantLen is the length of a grant in a fetch, bytes.
	P2PGrantLen = 16
)
