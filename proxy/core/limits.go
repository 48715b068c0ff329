package core

const (
	// MaxClientRequestID bounds a client's X-Request-Id. The legs' ids are made of it, and engines
	// put them into every notification about the request.
	MaxClientRequestID = 128

	// MaxRanks bounds tp_size and pp_size of an engine's coordinates; a decode engine allocates per
	// rank. Real ones are below 1024.
	MaxRanks = 1024

	// MaxText bounds the engine id and host of coordinates.
	MaxText = 4096
)
