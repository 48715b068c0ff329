package model

// The limits of this package. Each bounds what one input can make the process allocate.
const (
	// MaxVocab is above every published Llama vocabulary (128256) and keeps a row of logits
	// below 1 MiB.
	MaxVocab = 1 << 18
	// MaxHidden, MaxFFN, MaxHeads, MaxHeadDim and MaxLayers admit every published Llama and keep
	// each product of two of them within 32 bits.
	MaxHidden  = 1 << 14
	MaxFFN     = 1 << 16
	MaxHeads   = 1 << 8
	MaxHeadDim = 1 << 9
	MaxLayers  = 1 << 8
	// MaxContext bounds the rotation table: 64 MiB at a head dimension of 128.
	MaxContext = 1 << 17
	// MaxBatchTokens is the number of new tokens that one Forward call computes. The activations
	// of a call are kept whole, a few times MaxBatchTokens x hidden floats.
	MaxBatchTokens = 1 << 14
	// MaxBatchSeqs bounds the rows of logits of one call.
	MaxBatchSeqs = 1 << 10
	// MaxBlockSize is in tokens; stock engines use 8 to 128 per block on CPU and GPU.
	MaxBlockSize = 1 << 12
	// MaxParams is the number of weights a model may have: 32 GiB as float32, more than a CPU
	// engine meant for tests can use.
	MaxParams = 1 << 33

	// MaxAdapterName bounds an adapter's name in bytes; it is hashed with every prompt.
	MaxAdapterName = 256

	// maxHeaderBytes bounds a safetensors header; a header of a Llama with MaxLayers layers is
	// below 512 KiB.
	maxHeaderBytes = 8 << 20
	// maxTensors is 9 per layer and 3 more, with room for the ignored rotation buffers.
	maxTensors = 16 * MaxLayers
	// maxDims: weights are matrices and vectors; other tensors are refused later by name, with a
	// better message.
	maxDims = 8
	// maxNameBytes is several times the longest name of a Llama's weights.
	maxNameBytes = 1 << 10
	// maxConfigBytes and maxTokenizerBytes bound the two JSON files; a published tokenizer.json
	// with MaxVocab entries is below 32 MiB.
	maxConfigBytes    = 1 << 20
	maxTokenizerBytes = 32 << 20
)
