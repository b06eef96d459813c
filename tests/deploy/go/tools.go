//go:build tools

// Names the programs, so that `go mod tidy` keeps their modules: they are built by their paths.
package tools

import (
	_ "github.com/compose-spec/compose-go/v2/cmd"
	_ "helm.sh/helm/v3/cmd/helm"
)
