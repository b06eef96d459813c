// Names the NATS server, so that `go mod tidy` keeps it: it is built by its module path.
package peers

import _ "github.com/nats-io/nats-server/v2/server"
