package openai

const (
	// MaxDepth bounds how deep JSON may nest, so that a hostile body cannot grow a parser's stack.
	// Real bodies (tools with JSON schemas in them) stay under 30.
	MaxDepth = 128

	// MaxFields bounds the fields of the outermost object: each costs a table entry several times
	// the size of the shortest field. The API defines about 60.
	MaxFields = 1024

	// MaxPrompts bounds the prompts of one completions request: each becomes a request of its own.
	MaxPrompts = 128

	// MaxN bounds the answers per prompt, as the OpenAI API does.
	MaxN = 128

	// MaxChoices bounds prompts times n: the engine requests that one HTTP request can cause.
	MaxChoices = 256

	// MaxMessages bounds the messages of a chat, whose bookkeeping costs more than their bytes.
	MaxMessages = 16384

	// MaxMaxTokens bounds max_tokens far above every context, so that sums cannot overflow.
	MaxMaxTokens = 1 << 30

	// MaxStops and MaxStopBytes bound the stop strings: each is looked for in every new piece of
	// text. Four is the number of the OpenAI API.
	MaxStops     = 4
	MaxStopBytes = 1024

	// MaxStopTokens bounds the set that every sampled token is compared with.
	MaxStopTokens = 128

	// MaxSaltBytes bounds a cache salt, which is hashed with every block.
	MaxSaltBytes = 1024

	// MaxTemperature is the OpenAI API's.
	MaxTemperature = 2.0

	// MaxEventBytes bounds one server-sent event. The largest real ones carry a chunk's log
	// probabilities or token ids and stay below 1 MiB.
	MaxEventBytes = 8 << 20

	// maxQuoted bounds how much of a bad value an error message repeats.
	maxQuoted = 64
)
