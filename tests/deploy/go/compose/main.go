// Reads a compose file as `docker compose config` does, which is made of the same parser, and prints what it found.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	options, err := cli.NewProjectOptions(os.Args[1:])
	if err == nil {
		project, loaded := options.LoadProject(context.Background())
		if err = loaded; err == nil {
			var text []byte
			if text, err = project.MarshalYAML(); err == nil {
				fmt.Print(string(text))
			}
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
