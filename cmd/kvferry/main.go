package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// onePress is how long signals after the first one belong to it: timeout(1) sends its own twice, and a
// terminal sends one to every process of a pipeline. A later one ends the program at once.
const onePress = time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() { time.AfterFunc(onePress, stop) })
	err := newRoot().ExecuteContext(ctx)
	stop()
	if err == nil {
		return
	}
	fmt.Fprintf(os.Stderr, "kvferry: %v\n", err)
	if usage := (*usageError)(nil); errors.As(err, &usage) {
		os.Exit(2)
	}
	os.Exit(1)
}

// newRoot builds the command tree. It is a function so that tests get a tree of their own.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvferry",
		Short: "Move KV-cache blocks between LLM engines",
		Long: "kvferry moves KV-cache blocks between LLM engines: a prefill engine computes the KV cache of a\n" +
			"prompt and writes it into the memory of a decode engine, which goes on from there.",
		Example:       "  kvferry up          # a prefill engine, a decode engine and a router on this machine\n  kvferry up --check  # compare the pair with one engine, token by token",
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,

		SuggestionsMinimumDistance: 2,

		Args: knownCommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(flagError)
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(newUp(), newEngine(), newRouter(), newStore(), newCheckpoint())
	for _, c := range root.Commands() {
		layer(c)
	}
	root.SetHelpCommand(newHelp())
	return root
}
