// The load of the comparison: the same loops for every system, and one small driver for each protocol.
//
// Owns the loops and how they count. A latency at a given rate runs from the time at which the record was due, not from
// the time at which the client came to send it, so that a stall counts for all records that it delayed. The result is
// one line of JSON on standard output.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
)

// A System is one client's view of a log: a connection of its own.
type System interface {
	// Send stores one record, and returns when the system has acknowledged it.
	Send(ctx context.Context, value []byte) error
	// Tail gives every record that arrives from now on to `found`, until the context ends. It calls `ready` once.
	Tail(ctx context.Context, ready func(), found func(value []byte)) error
	// Commit stores a consumer's position.
	Commit(ctx context.Context, offset int64) error
	// Make creates the topic with three replicas.
	Make(ctx context.Context, partitions int) error
	// Leader is the place of the leader's address in the list of servers.
	Leader(ctx context.Context) (int, error)
	Close()
}

type options struct {
	system, topic   string
	servers         []string
	count, size     int
	clients, rate   int
	partitions      int
	seconds, warmUp float64
}

type result struct {
	Count   int     `json:"count"`
	Seconds float64 `json:"seconds"`
	P50     float64 `json:"p50_ms,omitempty"`
	P99     float64 `json:"p99_ms,omitempty"`
	Max     float64 `json:"max_ms,omitempty"`
	Gap     float64 `json:"gap_ms,omitempty"`
	Bytes   int64   `json:"bytes,omitempty"`
}

var lines = map[string]func(context.Context, options) (result, error){
	"single":  single,
	"commit":  commit,
	"clients": manyClients,
	"tail":    tail,
	"consume": consume,
	"gap":     gap,
	"make":    makeTopic,
}

func main() {
	var o options
	var servers, line string
	flag.StringVar(&line, "line", "", "what to measure")
	flag.StringVar(&o.system, "system", "", "kafka (smq too), etcd or nats")
	flag.StringVar(&servers, "servers", "", "addresses, separated by commas")
	flag.StringVar(&o.topic, "topic", "bench", "the topic, stream or prefix")
	flag.IntVar(&o.count, "count", 0, "records")
	flag.IntVar(&o.size, "size", 100, "bytes of a record")
	flag.IntVar(&o.clients, "clients", 1, "clients at the same time")
	flag.IntVar(&o.rate, "rate", 0, "records per second")
	flag.IntVar(&o.partitions, "partitions", 1, "of a topic that is made")
	flag.Float64Var(&o.seconds, "seconds", 10, "how long")
	flag.Float64Var(&o.warmUp, "warm-up", 1, "seconds that are not counted")
	flag.Parse()
	o.servers = strings.Split(servers, ",")
	measure, known := lines[line]
	if !known {
		fail(fmt.Errorf("there is no line %q", line))
	}
	found, err := measure(context.Background(), o)
	if err != nil {
		fail(err)
	}
	_ = json.NewEncoder(os.Stdout).Encode(found)
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func connect(o options) (System, error) {
	switch o.system {
	case "kafka":
		return connectKafka(o.servers, o.topic)
	case "etcd":
		return connectEtcd(o.servers, o.topic)
	case "nats":
		return connectNats(o.servers, o.topic)
	}
	return nil, fmt.Errorf("there is no driver for %q", o.system)
}
