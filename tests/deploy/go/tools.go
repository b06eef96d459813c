//go:build tools

// Names Helm, so that `go mod tidy` keeps its module: it is built by its path.
package tools

import _ "helm.sh/helm/v3/cmd/helm"
