//go:build race

package model

// The race detector makes arithmetic forty times slower and looks for other faults than these
// tests do: they run on fewer and shorter prompts under it.
func init() {
	promptLengths = []int{4, 17, 40}
	chunkSizes = []int{7, 64}
	variedLengths = []int{5, 100}
}
