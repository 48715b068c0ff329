package core

import "github.com/kvferry/kvferry/openai"

const (
	// MaxClientRequestID bounds a client's X-Request-Id. The legs' ids are made of it, and engines
	// put them into every notification about the request.
	MaxClientRequestID = 128

	// MaxAnswers bounds the answers of one request, prompts times n: each becomes a pair of legs of its
	// own. D gets requests for more as they are, and says what it thinks of them.
	MaxAnswers = openai.MaxChoices

	// MaxRanks bounds tp_size and pp_size of an engine's coordinates; a decode engine allocates per
	// rank. Real ones are below 1024.
	MaxRanks = 1024

	// maxConversationID bounds a client's conversation_id as written, bytes. Only a hash of it is kept.
	maxConversationID = 1024

	// maxTurns and maxTurnBytes bound what is remembered of conversations: a thousand decode engines with
	// some dozens each, block ids of long prompts and clients' keys. Beyond them the oldest are forgotten.
	maxTurns     = 1 << 16
	maxTurnBytes = 64 << 20

	// MaxText bounds the engine id and host of coordinates.
	MaxText = 4096
)
