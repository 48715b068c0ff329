package model

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
)

// Adapter changes a model for the sequences that name it: a matrix of low rank is added to the value
// projection of every layer, as LoRA does. KV that was computed with it is of use to no sequence
// without it. It is immutable and may be shared.
type Adapter struct {
	name   string
	cfg    Config
	layers []adapterLayer
}

// adapterLayer is what one layer's value projection gets more: up x (down x input).
type adapterLayer struct {
	down []float32 // [adapterRank][hidden]
	up   []float32 // [kvHeads*headDim][adapterRank]
}

const (
	adapterRank = 4
	// adapterGain makes what an adapter adds as large as what is there, so that other tokens follow.
	adapterGain = tinyValue
)

// SeededAdapter is an adapter for a model of this shape whose weights follow from its name: it needs
// no file, and engines that have it under one name have the same.
func SeededAdapter(cfg Config, name string) (*Adapter, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if name == "" || len(name) > MaxAdapterName {
		return nil, fmt.Errorf("adapter: a name of %d bytes, must have 1 to %d", len(name), MaxAdapterName)
	}
	sum := sha256.Sum256([]byte(name))
	rng := draws{state: binary.LittleEndian.Uint64(sum[:])}
	fill := func(rows, cols int, gain float64) []float32 {
		out := make([]float32, rows*cols)
		for i := range out {
			out[i] = float32(rng.normal() * float32(gain/math.Sqrt(float64(cols))))
		}
		return out
	}
	a := &Adapter{name: name, cfg: cfg, layers: make([]adapterLayer, cfg.Layers)}
	for i := range a.layers {
		a.layers[i] = adapterLayer{down: fill(adapterRank, cfg.Hidden, 1), up: fill(cfg.KVHeads*cfg.HeadDim, adapterRank, adapterGain)}
	}
	return a, nil
}

// Name is what requests call it.
func (a *Adapter) Name() string { return a.name }

// fits says why a model of another shape cannot use it, or nothing.
func (a *Adapter) fits(cfg *Config) string {
	if a.cfg.Layers != cfg.Layers || a.cfg.Hidden != cfg.Hidden || a.cfg.KVHeads != cfg.KVHeads || a.cfg.HeadDim != cfg.HeadDim {
		return fmt.Sprintf("adapter %q was made for another model", a.name)
	}
	return ""
}

// add adds to one row of values what the adapter makes of that row's input. The order of additions
// does not depend on what else is computed.
func (a *Adapter) add(layer int, v, input []float32) {
	l := &a.layers[layer]
	var mid [adapterRank]float32
	for i := range mid {
		mid[i] = dot(l.down[i*len(input):][:len(input)], input)
	}
	for i := range v {
		v[i] += dot(l.up[i*adapterRank:][:adapterRank], mid[:])
	}
}
