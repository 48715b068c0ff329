package model

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// WeightType is how Save stores weights.
type WeightType string

const (
	// F32 stores weights as they are.
	F32 WeightType = "F32"
	// BF16 rounds weights to bfloat16; those of kvferry-tiny and of a loaded BF16 checkpoint are
	// exact in it.
	BF16 WeightType = "BF16"
)

// Save writes a checkpoint that Load and stock engines read: config.json, model.safetensors,
// tokenizer.json and tokenizer_config.json. It creates dir if needed and replaces each file as a
// whole.
func (m *Model) Save(dir string, as WeightType) error {
	dtype := map[WeightType]string{F32: "float32", BF16: "bfloat16"}[as]
	if dtype == "" {
		return fmt.Errorf("save model: weight type %q is unknown, use F32 or BF16", string(as))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("save model: %w", err)
	}
	texts := []struct {
		name   string
		format func() ([]byte, error)
	}{
		{configFile, func() ([]byte, error) { return formatConfig(m.cfg, dtype) }},
		{tokenizerFile, func() ([]byte, error) { return formatTokenizer(m.tok) }},
		{tokenizerConfigFile, func() ([]byte, error) { return formatTokenizerConfig(m) }},
	}
	for _, t := range texts {
		data, err := t.format()
		if err != nil {
			return fmt.Errorf("save model: %s: %w", t.name, err)
		}
		if err := replaceFile(dir, t.name, func(w io.Writer) error { _, err := w.Write(data); return err }); err != nil {
			return err
		}
	}
	return replaceFile(dir, weightsFile, func(w io.Writer) error { return m.writeWeights(w, as) })
}

// replaceFile writes a file beside its place and moves it there when it is whole.
func replaceFile(dir, name string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(dir, name+".*.part")
	if err != nil {
		return fmt.Errorf("save model: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("save model: %w", err)
		}
	}()
	w := bufio.NewWriterSize(f, 1<<18)
	if err := write(w); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), filepath.Join(dir, name))
}

func (m *Model) writeWeights(w io.Writer, as WeightType) error {
	list := m.weights.tensors(m.cfg)
	slices.SortFunc(list, func(a, b tensor) int { return strings.Compare(a.name, b.name) })
	width := int(dtypeBytes[string(as)])
	header := map[string]any{"__metadata__": map[string]string{"format": "pt"}}
	at := 0
	for _, t := range list {
		end := at + t.size()*width
		header[t.name] = map[string]any{"dtype": as, "shape": t.shape(), "data_offsets": []int{at, end}}
		at = end
	}
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	if _, err := w.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(text)))); err != nil {
		return err
	}
	if _, err := w.Write(text); err != nil {
		return err
	}
	buf := make([]byte, 0, 1<<16)
	for _, t := range list {
		for i, v := range *t.data {
			if as == F32 {
				buf = binary.LittleEndian.AppendUint32(buf, math.Float32bits(v))
			} else {
				buf = binary.LittleEndian.AppendUint16(buf, toBF16(v))
			}
			if len(buf) < 1<<16-4 && i < len(*t.data)-1 {
				continue
			}
			if _, err := w.Write(buf); err != nil {
				return err
			}
			buf = buf[:0]
		}
	}
	return nil
}
