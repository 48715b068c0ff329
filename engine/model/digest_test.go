package model

import "testing"

// A digest is of shape and weights: it is the same for the same, whatever the model is called, and tells one
// changed weight.
func TestDigest(t *testing.T) {
	m, again := Tiny(), Tiny()
	again.cfg.Name = "other"
	if m.Digest() != again.Digest() {
		t.Error("the same model has two digests")
	}
	again.weights.Layers[1].Down[5]++
	if m.Digest() == again.Digest() {
		t.Error("a changed weight is not told")
	}
	theta := Tiny()
	theta.cfg.RopeTheta++
	if m.Digest() == theta.Digest() {
		t.Error("another rotation is not told")
	}
}
