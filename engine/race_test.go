//go:build race

package engine

// The race detector makes arithmetic forty times slower, and the model's is not what it looks at.
func init() { longPrompt = 60 }
