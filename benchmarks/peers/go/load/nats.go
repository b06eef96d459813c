package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// natsSystem publishes to a JetStream stream with three replicas on disk.
type natsSystem struct {
	connection *nats.Conn
	stream     jetstream.JetStream
	servers    []string
	topic      string
}

func connectNats(servers []string, topic string) (System, error) {
	connection, err := nats.Connect("nats://"+strings.Join(servers, ",nats://"), nats.MaxReconnects(-1))
	if err != nil {
		return nil, err
	}
	stream, err := jetstream.New(connection)
	return &natsSystem{connection, stream, servers, topic}, err
}

// Make asks again: nodes take connections before they have elected a leader for streams, and drop requests until then.
func (n *natsSystem) Make(ctx context.Context, _ int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		attempt, end := context.WithTimeout(ctx, time.Second)
		_, err := n.stream.CreateStream(attempt, jetstream.StreamConfig{
			Name: n.topic, Subjects: []string{n.topic}, Replicas: 3, Storage: jetstream.FileStorage,
		})
		end()
		if err == nil || ctx.Err() != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (n *natsSystem) Send(ctx context.Context, value []byte) error {
	_, err := n.stream.Publish(ctx, n.topic, value)
	return err
}

func (n *natsSystem) Tail(ctx context.Context, ready func(), found func([]byte)) error {
	consumer, err := n.stream.OrderedConsumer(ctx, n.topic, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverNewPolicy,
	})
	if err != nil {
		return err
	}
	running, err := consumer.Consume(func(message jetstream.Msg) { found(message.Data()) })
	if err != nil {
		return err
	}
	defer running.Stop()
	ready()
	<-ctx.Done()
	return nil
}

func (n *natsSystem) Commit(context.Context, int64) error {
	return fmt.Errorf("NATS keeps a consumer's position by acknowledgements of single records")
}

func (n *natsSystem) Leader(ctx context.Context) (int, error) {
	stream, err := n.stream.Stream(ctx, n.topic)
	if err != nil {
		return 0, err
	}
	info, err := stream.Info(ctx)
	if err != nil {
		return 0, err
	}
	var place int
	if _, err := fmt.Sscanf(info.Cluster.Leader, "node-%d", &place); err != nil {
		return 0, fmt.Errorf("the stream's leader is %q", info.Cluster.Leader)
	}
	return place - 1, nil
}

func (n *natsSystem) Close() { n.connection.Close() }
