package main

import (
	"fmt"
	"strings"
)

// checkCase is one step of `up --check`: prompts that are sent at once, and how they are sampled.
type checkCase struct {
	name      string
	prompts   []string
	maxTokens int
	ignoreEOS bool
	stopFirst bool // stop at the first token that a single engine gives
	stream    bool
}

// text makes a deterministic prompt of n characters, one token each, different for each seed.
func text(seed, n int) string {
	words := []string{"ferry ", "block ", "lease ", "grant ", "rank ", "engine ", "harbour ", "tide ", "cargo ", "rope "}
	var sb strings.Builder
	fmt.Fprintf(&sb, "%d: ", seed)
	for i := seed*7 + 3; sb.Len() < n; i = i*5 + seed + 1 {
		sb.WriteString(words[(i/3)%len(words)])
		i %= 9973
	}
	return sb.String()[:n]
}

// checkCases is the fixed set of prompts for engines of this block size and context.
func checkCases(blockSize, context int) []checkCase {
	bs := blockSize
	many := 20*bs + 3
	shared := text(50, 4*bs)
	cases := []checkCase{
		{name: "1 token", prompts: []string{"k"}, maxTokens: 16},
		{name: "one less than a block", prompts: []string{text(1, bs-1)}, maxTokens: 16},
		{name: "exactly a block", prompts: []string{text(2, bs)}, maxTokens: 16},
		{name: "one more than a block", prompts: []string{text(3, bs+1)}, maxTokens: 16},
		{name: "many blocks", prompts: []string{text(4, many)}, maxTokens: 32},
		{name: "many blocks, streamed", prompts: []string{text(5, many+bs/2)}, maxTokens: 32, stream: true},
		{name: "shared prefix, first", prompts: []string{shared + text(6, 5)}, maxTokens: 16},
		{name: "shared prefix, second", prompts: []string{shared + text(7, bs+2)}, maxTokens: 16},
		{name: "shared prefix, whole prompt again", prompts: []string{shared + text(7, bs+2)}, maxTokens: 16},
		{name: "shared prefix, exact blocks", prompts: []string{shared}, maxTokens: 16},
		{name: "max_tokens 1", prompts: []string{text(8, 3*bs+1)}, maxTokens: 1},
		{name: "max_tokens 2", prompts: []string{text(9, 2*bs)}, maxTokens: 2},
		{name: "max_tokens 3", prompts: []string{text(10, 2*bs-1)}, maxTokens: 3},
		{name: "first token stops", prompts: []string{text(11, 3*bs)}, maxTokens: 16, stopFirst: true},
		{name: "prompt = context - 1", prompts: []string{text(12, context-1)}, maxTokens: 1},
	}
	several := checkCase{name: "several at once", maxTokens: 24}
	for i := range 8 {
		several.prompts = append(several.prompts, text(20+i, (i+1)*bs+i*3))
	}
	again := checkCase{name: "several at once with a shared prefix", maxTokens: 16}
	for i := range 4 {
		again.prompts = append(again.prompts, shared+text(30+i, bs+i))
	}
	return append(cases, several, again)
}
