package model

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Load reads a Llama checkpoint from a directory: config.json, model.safetensors (F32, F16 or BF16)
// and tokenizer.json (byte-level without merges, adding no tokens to a text). The model is named after
// the directory. A chat template and generation defaults beside them are not read. Errors about contents
// are FormatError or UnsupportedError.
func Load(dir string) (*Model, error) {
	raw, err := readSmall(dir, configFile, maxConfigBytes)
	if err != nil {
		return nil, err
	}
	cfg, err := parseConfig(raw)
	if err != nil {
		return nil, err
	}
	cfg.Name = filepath.Base(dir)
	if abs, err := filepath.Abs(dir); err == nil {
		cfg.Name = filepath.Base(abs)
	}
	raw, err = readSmall(dir, tokenizerFile, maxTokenizerBytes)
	if err != nil {
		return nil, err
	}
	tok, err := parseTokenizer(raw)
	if err != nil {
		return nil, err
	}
	w, err := loadWeights(dir, cfg)
	if err != nil {
		return nil, err
	}
	return New(cfg, w, tok)
}

// readSmall reads a whole file of a bounded size.
func readSmall(dir, name string, most int64) ([]byte, error) {
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return nil, fmt.Errorf("load model: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, fmt.Errorf("load model: %w", err)
	}
	if int64(len(data)) > most {
		return nil, &FormatError{File: name, Reason: fmt.Sprintf("is larger than %d bytes", most)}
	}
	return data, nil
}

func loadWeights(dir string, cfg Config) (Weights, error) {
	f, err := os.Open(filepath.Join(dir, weightsFile))
	if errors.Is(err, fs.ErrNotExist) {
		if _, sharded := os.Stat(filepath.Join(dir, weightsFile+".index.json")); sharded == nil {
			return Weights{}, &UnsupportedError{File: weightsFile + ".index.json", Field: "checkpoint",
				Value: "split into several files", Need: "a single " + weightsFile}
		}
	}
	if err != nil {
		return Weights{}, fmt.Errorf("load model: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return Weights{}, fmt.Errorf("load model: %w", err)
	}
	return readWeights(f, info.Size(), cfg)
}

// readWeights reads exactly the tensors that cfg describes. A missing one, one of another shape and
// one that the model has no use for are errors: each means that the file is of another model.
func readWeights(r io.ReaderAt, size int64, cfg Config) (Weights, error) {
	all, data, err := readHeader(r, size)
	if err != nil {
		return Weights{}, err
	}
	w := Weights{Layers: make([]LayerWeights, cfg.Layers)}
	for _, t := range w.tensors(cfg) {
		s, ok := all[t.name]
		if !ok {
			return Weights{}, badWeights(t.name, "is missing")
		}
		delete(all, t.name)
		if !slices.EqualFunc(s.shape, t.shape(), func(a int64, b int) bool { return a == int64(b) }) {
			return Weights{}, badWeights(t.name, "has shape %v, %s asks for %v", s.shape, configFile, t.shape())
		}
		if s.dtype != "F32" && s.dtype != "F16" && s.dtype != "BF16" {
			return Weights{}, &UnsupportedError{File: weightsFile, Field: t.name, Value: "of type " + s.dtype, Need: "F32, F16 or BF16"}
		}
		*t.data = make([]float32, t.size())
		if err := readTensor(r, data+s.begin, t.name, s, *t.data); err != nil {
			return Weights{}, err
		}
	}
	for name := range all {
		// Older writers stored the rotation frequencies, which follow from the config, and some
		// store a tied head a second time.
		if strings.HasSuffix(name, ".rotary_emb.inv_freq") || cfg.Tied && name == "lm_head.weight" {
			continue
		}
		return Weights{}, &UnsupportedError{File: weightsFile, Field: "tensor " + short(name), Value: "present", Need: "a plain Llama's weights"}
	}
	return w, nil
}
