package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// kafkaSystem speaks Kafka's protocol, to Kafka and to smq: acks=all, idempotent, no linger.
type kafkaSystem struct {
	client  *kgo.Client
	servers []string
	topic   string
}

func connectKafka(servers []string, topic string) (System, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(servers...),
		kgo.DefaultProduceTopic(topic),
		kgo.ProducerLinger(0),
		kgo.ProducerBatchCompression(kgo.NoCompression()),
	)
	return &kafkaSystem{client, servers, topic}, err
}

func (k *kafkaSystem) Make(ctx context.Context, partitions int) error {
	made, err := kadm.NewClient(k.client).CreateTopics(ctx, int32(partitions), 3, nil, k.topic)
	if err != nil {
		return err
	}
	return made.Error()
}

func (k *kafkaSystem) Send(ctx context.Context, value []byte) error {
	return k.client.ProduceSync(ctx, &kgo.Record{Value: value}).FirstErr()
}

func (k *kafkaSystem) Tail(ctx context.Context, ready func(), found func([]byte)) error {
	ends, err := kadm.NewClient(k.client).ListEndOffsets(ctx, k.topic)
	if err != nil {
		return err
	}
	positions := map[string]map[int32]kgo.Offset{k.topic: {}}
	ends.Each(func(o kadm.ListedOffset) { positions[k.topic][o.Partition] = kgo.NewOffset().At(o.Offset) })
	client, err := kgo.NewClient(kgo.SeedBrokers(k.servers...), kgo.ConsumePartitions(positions))
	if err != nil {
		return err
	}
	defer client.Close()
	ready()
	for ctx.Err() == nil {
		client.PollFetches(ctx).EachRecord(func(r *kgo.Record) { found(r.Value) })
	}
	return nil
}

func (k *kafkaSystem) Read(ctx context.Context, count int) (int64, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(k.servers...),
		kgo.ConsumeTopics(k.topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchMaxPartitionBytes(4<<20),
	)
	if err != nil {
		return 0, err
	}
	defer client.Close()
	size, left := int64(0), count
	for left > 0 {
		fetches := client.PollFetches(ctx)
		if errs := fetches.Errors(); len(errs) > 0 {
			return 0, errs[0].Err
		}
		fetches.EachRecord(func(r *kgo.Record) {
			size += int64(len(r.Value))
			left--
		})
	}
	return size, nil
}

func (k *kafkaSystem) Commit(ctx context.Context, offset int64) error {
	positions := kadm.Offsets{}
	positions.AddOffset(k.topic, 0, offset, -1)
	answers, err := kadm.NewClient(k.client).CommitOffsets(ctx, "bench", positions)
	if err != nil {
		return err
	}
	return answers.Error()
}

func (k *kafkaSystem) Leader(ctx context.Context) (int, error) {
	found, err := kadm.NewClient(k.client).Metadata(ctx, k.topic)
	if err != nil {
		return 0, err
	}
	leader := found.Topics[k.topic].Partitions[0].Leader
	for _, broker := range found.Brokers {
		for i, server := range k.servers {
			if broker.NodeID == leader && strings.HasSuffix(server, fmt.Sprintf(":%d", broker.Port)) {
				return i, nil
			}
		}
	}
	return 0, fmt.Errorf("no server is the leader, node %d", leader)
}

func (k *kafkaSystem) Close() { k.client.Close() }
