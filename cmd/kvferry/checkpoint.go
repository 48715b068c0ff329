package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/engine/model"
)

// checkpointWeights are the types that weights are written in, by the name of the setting.
var checkpointWeights = map[string]model.WeightType{"bf16": model.BF16, "f32": model.F32}

func newCheckpoint() *cobra.Command {
	var weights string
	cmd := &cobra.Command{
		Use:   "checkpoint DIR",
		Short: "Write the built-in model as a checkpoint",
		Long: "Write kvferry-tiny as a Llama checkpoint that stock engines load too: config.json, model.safetensors,\n" +
			"tokenizer.json and tokenizer_config.json. DIR is made if it is not there; files of these names in it are\n" +
			"replaced. The weights are exact in both types: bf16 is half the size.",
		Example: "  kvferry checkpoint ./tiny\n" +
			"  kvferry engine --model ./tiny                 # the same tokens as the built-in one\n" +
			"  vllm serve ./tiny --dtype float32             # a stock engine with the same weights",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 || args[0] == "" {
				return usagef("%s takes one argument, the directory to write, got %q; see `%s --help`", cmd.CommandPath(), args, cmd.CommandPath())
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return writeCheckpoint(cmd.OutOrStdout(), args[0], weights)
		},
	}
	cmd.Flags().StringVar(&weights, "weights", "bf16", "`TYPE` of the weights in the file: bf16 or f32")
	return cmd
}

func writeCheckpoint(w io.Writer, dir, weights string) error {
	as, ok := checkpointWeights[strings.ToLower(weights)]
	if !ok {
		return usagef("--weights %q is unknown, use bf16 or f32", weights)
	}
	if err := model.Tiny().Save(dir, as); err != nil {
		return err
	}
	fmt.Fprintf(w, "wrote %s with %s weights to %s\n", model.TinyName, as, dir)
	return nil
}
