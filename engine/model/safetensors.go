package model

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
)

const weightsFile = "model.safetensors"

// stored is one tensor of a safetensors file.
type stored struct {
	dtype      string
	shape      []int64
	begin, end int64 // bytes behind the header
}

// dtypeBytes are the element sizes of the format. Only three of them can be weights here.
var dtypeBytes = map[string]int64{
	"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
	"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}

func badWeights(where, format string, args ...any) error {
	return &FormatError{File: weightsFile, Where: where, Reason: fmt.Sprintf(format, args...)}
}

// readHeader reads the 8-byte length and the header of a file of size bytes. It returns the tensors
// and where the data begins.
func readHeader(r io.ReaderAt, size int64) (map[string]stored, int64, error) {
	var prefix [8]byte
	if size < int64(len(prefix)) {
		return nil, 0, badWeights("", "has %d bytes, too few for a header", size)
	}
	if _, err := r.ReadAt(prefix[:], 0); err != nil {
		return nil, 0, fmt.Errorf("%s: %w", weightsFile, err)
	}
	n := binary.LittleEndian.Uint64(prefix[:])
	if n > maxHeaderBytes {
		return nil, 0, badWeights("", "header of %d bytes, at most %d are accepted", n, maxHeaderBytes)
	}
	if int64(n) > size-8 {
		return nil, 0, badWeights("", "header of %d bytes in a file of %d", n, size)
	}
	header := make([]byte, n)
	if _, err := r.ReadAt(header, 8); err != nil {
		return nil, 0, fmt.Errorf("%s: %w", weightsFile, err)
	}
	tensors, err := parseHeader(header, size-8-int64(n))
	return tensors, 8 + int64(n), err
}

// parseHeader checks a header against the number of data bytes behind it. In what it accepts,
// names are unique, every shape fits its range, and the ranges cover the data without overlap and
// without gap.
func parseHeader(header []byte, dataLen int64) (map[string]stored, error) {
	if len(header) == 0 || header[0] != '{' {
		return nil, badWeights("", "header does not begin with an object")
	}
	d := json.NewDecoder(bytes.NewReader(header))
	if _, err := d.Token(); err != nil {
		return nil, badWeights("", "header: %v", err)
	}
	tensors := map[string]stored{}
	metadata := false
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, badWeights("", "header: %v", err)
		}
		name, _ := key.(string)
		if name == "__metadata__" {
			var m map[string]string
			if err := d.Decode(&m); err != nil || metadata {
				return nil, badWeights(name, "is not one map of strings")
			}
			metadata = true
			continue
		}
		if _, twice := tensors[name]; twice {
			return nil, badWeights(short(name), "is listed twice")
		}
		if len(tensors) == maxTensors || len(name) > maxNameBytes {
			return nil, badWeights(short(name), "too many tensors or too long a name (at most %d of %d bytes)", maxTensors, maxNameBytes)
		}
		t, err := parseEntry(d, short(name), dataLen)
		if err != nil {
			return nil, err
		}
		tensors[name] = t
	}
	if _, err := d.Token(); err != nil {
		return nil, badWeights("", "header: %v", err)
	}
	if rest := header[d.InputOffset():]; len(bytes.Trim(rest, " ")) > 0 {
		return nil, badWeights("", "header has %d bytes behind its object", len(rest))
	}
	return tensors, checkCover(tensors, dataLen)
}

func parseEntry(d *json.Decoder, name string, dataLen int64) (stored, error) {
	var e struct {
		DType   *string `json:"dtype"`
		Shape   []int64 `json:"shape"`
		Offsets []int64 `json:"data_offsets"`
	}
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil {
		return stored{}, badWeights(name, "%v", err)
	}
	if e.DType == nil || e.Shape == nil || len(e.Offsets) != 2 {
		return stored{}, badWeights(name, "needs dtype, shape and two data_offsets")
	}
	bytes, known := dtypeBytes[*e.DType]
	if !known {
		return stored{}, &UnsupportedError{File: weightsFile, Field: name, Value: "of type " + short(*e.DType), Need: "F32, F16 or BF16"}
	}
	if len(e.Shape) > maxDims {
		return stored{}, badWeights(name, "has %d dimensions, at most %d are accepted", len(e.Shape), maxDims)
	}
	for _, n := range e.Shape {
		if n < 0 {
			return stored{}, badWeights(name, "shape %v is negative", e.Shape)
		}
		if n > 0 && bytes > dataLen/n {
			return stored{}, badWeights(name, "shape %v is larger than the file", e.Shape)
		}
		bytes *= n
	}
	begin, end := e.Offsets[0], e.Offsets[1]
	if begin < 0 || begin > end || end > dataLen {
		return stored{}, badWeights(name, "range %d to %d lies outside %d bytes of data", begin, end, dataLen)
	}
	if end-begin != bytes {
		return stored{}, badWeights(name, "%s of shape %v has %d bytes, its range %d", *e.DType, e.Shape, bytes, end-begin)
	}
	return stored{dtype: *e.DType, shape: e.Shape, begin: begin, end: end}, nil
}

// checkCover demands that the ranges, in order, cover the data exactly.
func checkCover(tensors map[string]stored, dataLen int64) error {
	order := make([]stored, 0, len(tensors))
	for _, t := range tensors {
		order = append(order, t)
	}
	slices.SortFunc(order, func(a, b stored) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end))
	})
	at := int64(0)
	for _, t := range order {
		if t.begin != at {
			return badWeights("", "tensor at %d overlaps or leaves a gap: the one before ends at %d", t.begin, at)
		}
		at = t.end
	}
	if at != dataLen {
		return badWeights("", "%d bytes of data, tensors cover %d", dataLen, at)
	}
	return nil
}

// readTensor converts a stored tensor, which begins at offset, to float32.
func readTensor(r io.ReaderAt, offset int64, name string, t stored, dst []float32) error {
	width := int(dtypeBytes[t.dtype])
	buf := make([]byte, min(len(dst)*width, 1<<20))
	for len(dst) > 0 {
		n := min(len(dst), len(buf)/width)
		if _, err := r.ReadAt(buf[:n*width], offset); err != nil {
			return fmt.Errorf("%s: %s: %w", weightsFile, name, err)
		}
		for i := range n {
			var v float32
			switch t.dtype {
			case "F32":
				v = math.Float32frombits(binary.LittleEndian.Uint32(buf[4*i:]))
			case "BF16":
				v = fromBF16(binary.LittleEndian.Uint16(buf[2*i:]))
			default:
				v = fromF16(binary.LittleEndian.Uint16(buf[2*i:]))
			}
			if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
				return badWeights(name, "has a weight that is not finite")
			}
			dst[i] = v
		}
		dst = dst[n:]
		offset += int64(n * width)
	}
	return nil
}
