// Writes ten orders and reads ten, from its group's commit on.
//
//	go run . 127.0.0.1:9092 orders
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	count = 10
	idle  = 30 * time.Second
)

var customers = []string{"ada", "ben", "cleo"}

func main() {
	servers, topic := os.Args[1], os.Args[2]
	client, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(servers, ",")...),
		kgo.ConsumerGroup(topic+"-go"),
		kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	if err := write(client, topic); err != nil {
		log.Fatal(err)
	}
	if err := read(client); err != nil {
		log.Fatal(err)
	}
}

func write(client *kgo.Client, topic string) error {
	var orders []*kgo.Record
	for number := range count {
		key, value := customers[number%len(customers)], fmt.Sprintf("order %d", number)
		orders = append(orders, &kgo.Record{Topic: topic, Key: []byte(key), Value: []byte(value)})
	}
	return client.ProduceSync(context.Background(), orders...).FirstErr()
}

func read(client *kgo.Client) error {
	for found := 0; found < count; {
		ctx, cancel := context.WithTimeout(context.Background(), idle)
		fetches := client.PollFetches(ctx)
		cancel()
		if err := fetches.Err(); err != nil {
			return err
		}
		fetches.EachRecord(func(order *kgo.Record) {
			fmt.Printf("%d/%d %s: %s\n", order.Partition, order.Offset, order.Key, order.Value)
			found++
		})
		if err := client.CommitUncommittedOffsets(context.Background()); err != nil {
			return err
		}
	}
	return nil
}
