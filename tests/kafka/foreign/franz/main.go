// franz-go behind the drivers' protocol: one JSON object a line in, one out. See ../driver.py for the operations.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

const (
	timeout     = 40 * time.Second
	copyTimeout = 400 * time.Second
	step        = 500 * time.Millisecond
)

var codecs = map[string]kgo.CompressionCodec{
	"none":   kgo.NoCompression(),
	"gzip":   kgo.GzipCompression(),
	"snappy": kgo.SnappyCompression(),
	"lz4":    kgo.Lz4Compression(),
	"zstd":   kgo.ZstdCompression(),
}

// item is one record as the protocol writes it; []byte is base64 in JSON, nil is null.
type item struct {
	Key       []byte   `json:"k"`
	Value     []byte   `json:"v"`
	Timestamp int64    `json:"t"`
	Headers   [][2]any `json:"h"`
	Offset    int64    `json:"o"`
	Partition int32    `json:"p"`
}

type request struct {
	Op         string
	Topic      string
	Partitions int32
	Codec      string
	Records    []struct {
		K, V []byte
		T    int64
		H    [][2]string
	}
	Group     string
	Count     int
	Timestamp int64
	Target    string
}

type answer map[string]any

func main() {
	servers := kgo.SeedBrokers(strings.Split(os.Args[1], ",")...)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var asked request
		out, err := answer(nil), json.Unmarshal(lines.Bytes(), &asked)
		if err == nil {
			out, err = run(servers, asked)
		}
		if err != nil {
			out = answer{"error": err.Error()}
		}
		data, _ := json.Marshal(out)
		fmt.Println(string(data))
	}
}

func run(servers kgo.Opt, asked request) (answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	switch asked.Op {
	case "hello":
		return answer{"version": version(), "codecs": []string{"none", "gzip", "snappy", "lz4", "zstd"}}, nil
	case "create":
		return create(ctx, servers, asked)
	case "produce":
		return produce(ctx, servers, asked)
	case "read":
		return readAt(ctx, servers, asked, kgo.NewOffset().AtStart())
	case "committed":
		return readAt(ctx, servers, asked, kgo.NewOffset().AtStart(), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	case "transact":
		return transact(ctx, servers, asked.Topic)
	case "copy":
		return copyAll(servers, asked)
	case "group":
		return group(ctx, servers, asked)
	case "time":
		return readAt(ctx, servers, asked, kgo.NewOffset().AfterMilli(asked.Timestamp))
	case "commits":
		return commits(ctx, servers, asked)
	}
	return nil, errors.New("there is no operation " + asked.Op)
}

// commits runs transactions 0 to Count - 1, each with its number to every partition. Every third is aborted. One whose
// records fail is aborted, and its number counts as failed.
func commits(ctx context.Context, servers kgo.Opt, asked request) (answer, error) {
	client, err := kgo.NewClient(
		servers, kgo.TransactionalID("tx-"+asked.Topic), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	failed := []int{}
	for n := range asked.Count {
		if err := client.BeginTransaction(); err != nil {
			return nil, fmt.Errorf("transaction %d: %w", n, err)
		}
		records := make([]*kgo.Record, asked.Partitions)
		for i := range records {
			records[i] = &kgo.Record{Topic: asked.Topic, Partition: int32(i), Value: fmt.Append(nil, n)}
		}
		produced := client.ProduceSync(ctx, records...).FirstErr()
		if produced != nil {
			failed = append(failed, n)
		}
		if err := client.EndTransaction(ctx, kgo.TransactionEndTry(produced == nil && n%3 != 2)); err != nil {
			return nil, fmt.Errorf("end of transaction %d: %w", n, err)
		}
	}
	return answer{"failed": failed}, nil
}

// transact is Client.transact in ../driver.py.
func transact(ctx context.Context, servers kgo.Opt, topic string) (answer, error) {
	id, manual := kgo.TransactionalID("tx-"+topic), kgo.RecordPartitioner(kgo.ManualPartitioner())
	client, err := kgo.NewClient(servers, id, manual)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	for n := range 3 {
		if err := client.BeginTransaction(); err != nil {
			return nil, fmt.Errorf("transaction %d: %w", n, err)
		}
		if err := client.ProduceSync(ctx, &kgo.Record{Topic: topic, Value: fmt.Append(nil, n)}).FirstErr(); err != nil {
			return nil, fmt.Errorf("record %d: %w", n, err)
		}
		if err := stage(ctx, servers, client, topic, int64(n)); err != nil {
			return nil, fmt.Errorf("offset %d: %w", n, err)
		}
		if err := client.EndTransaction(ctx, kgo.TransactionEndTry(n != 1)); err != nil {
			return nil, fmt.Errorf("end of transaction %d: %w", n, err)
		}
	}
	if err := client.BeginTransaction(); err != nil {
		return nil, err
	}
	if err := client.ProduceSync(ctx, &kgo.Record{Topic: topic, Value: []byte("zombie")}).FirstErr(); err != nil {
		return nil, err
	}
	next, err := kgo.NewClient(servers, id, manual)
	if err != nil {
		return nil, err
	}
	defer next.Close()
	if _, _, err := next.ProducerID(ctx); err != nil {
		return nil, err
	}
	if err := client.EndTransaction(ctx, kgo.TryCommit); err != nil {
		return answer{"failure": err.Error()}, nil
	}
	return answer{"failure": "none"}, nil
}

// stage brings an offset of the topic's group into the open transaction. Without a group of its own a client of franz-go
// has no call for it, so this sends the requests, as the first protocol does: the client may still use that, and then an
// offset that joins by itself is refused.
func stage(ctx context.Context, servers kgo.Opt, client *kgo.Client, topic string, offset int64) error {
	id, epoch, err := client.ProducerID(ctx)
	if err != nil {
		return err
	}
	requests, err := kgo.NewClient(servers, kgo.MaxVersions(kversion.V3_9_0()))
	if err != nil {
		return err
	}
	defer requests.Close()
	adding := kmsg.NewPtrAddOffsetsToTxnRequest()
	adding.TransactionalID, adding.Group = "tx-"+topic, "group-"+topic
	adding.ProducerID, adding.ProducerEpoch = id, epoch
	added, err := adding.RequestWith(ctx, requests)
	if err != nil {
		return err
	}
	if err := kerr.ErrorForCode(added.ErrorCode); err != nil {
		return err
	}
	partition := kmsg.NewTxnOffsetCommitRequestTopicPartition()
	partition.Offset = offset
	asked := kmsg.NewTxnOffsetCommitRequestTopic()
	asked.Topic, asked.Partitions = topic, append(asked.Partitions, partition)
	request := kmsg.NewPtrTxnOffsetCommitRequest()
	request.TransactionalID, request.Group, request.Generation = "tx-"+topic, "group-"+topic, -1
	request.ProducerID, request.ProducerEpoch, request.Topics = id, epoch, append(request.Topics, asked)
	found, err := request.RequestWith(ctx, requests)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(found.Topics[0].Partitions[0].ErrorCode)
}

// copyAll is Client.copy in ../driver.py.
func copyAll(servers kgo.Opt, asked request) (answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), copyTimeout)
	defer cancel()
	begun, aborted, failed := 0, 0, 0
	for ctx.Err() == nil {
		session, err := kgo.NewGroupTransactSession(
			servers, kgo.TransactionalID("copy-"+asked.Target), kgo.RecordPartitioner(kgo.ManualPartitioner()),
			kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.RequireStableFetchOffsets(),
			kgo.ConsumerGroup(asked.Group), kgo.ConsumeTopics(asked.Topic), kgo.SessionTimeout(6*time.Second),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
		if err != nil {
			return nil, err
		}
		for done := false; err == nil && ctx.Err() == nil; {
			done, err = copySome(ctx, session, asked, &begun, &aborted)
			if done {
				session.Close()
				return answer{"aborted": aborted, "failed": failed}, nil
			}
		}
		fmt.Fprintln(os.Stderr, "begins again:", err)
		failed++
		session.Close()
	}
	return nil, ctx.Err()
}

// copySome runs one transaction at most; it is true if there is nothing more to copy.
func copySome(
	ctx context.Context, session *kgo.GroupTransactSession, asked request, begun, aborted *int,
) (bool, error) {
	polling, cancel := context.WithTimeout(ctx, step)
	records := session.PollRecords(polling, 10).Records()
	cancel()
	if len(records) == 0 {
		return isCopied(ctx, session.Client(), asked)
	}
	if err := session.Begin(); err != nil {
		return false, err
	}
	promise := kgo.AbortingFirstErrPromise(session.Client())
	for _, record := range records {
		value := append([]byte("copy of "), record.Value...)
		session.Produce(ctx, &kgo.Record{Topic: asked.Target, Partition: record.Partition, Value: value}, promise.Promise())
	}
	*begun++
	wanted := *begun%5 != 0
	committed, err := session.End(ctx, kgo.TransactionEndTry(promise.Err() == nil && wanted))
	if !committed {
		*aborted++
	}
	return false, err
}

func isCopied(ctx context.Context, client *kgo.Client, asked request) (bool, error) {
	found, err := kadm.NewClient(client).FetchOffsets(ctx, asked.Group)
	if err != nil {
		return false, nil // a node is down: the next look may be answered
	}
	copied := found[asked.Topic]
	for _, offset := range copied {
		if offset.Err != nil || offset.At < int64(asked.Count) {
			return false, nil
		}
	}
	return len(copied) == int(asked.Partitions), nil
}

func version() string {
	info, _ := debug.ReadBuildInfo()
	for _, dependency := range info.Deps {
		if dependency.Path == "github.com/twmb/franz-go" {
			return strings.TrimPrefix(dependency.Version, "v")
		}
	}
	return "unknown"
}

func create(ctx context.Context, servers kgo.Opt, asked request) (answer, error) {
	client, err := kgo.NewClient(servers)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	_, err = kadm.NewClient(client).CreateTopic(ctx, asked.Partitions, -1, nil, asked.Topic)
	return answer{}, err
}

func produce(ctx context.Context, servers kgo.Opt, asked request) (answer, error) {
	client, err := kgo.NewClient(servers, kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerLinger(50*time.Millisecond), kgo.ProducerBatchCompression(codecs[asked.Codec]))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	var records []*kgo.Record
	for _, r := range asked.Records {
		record := &kgo.Record{Topic: asked.Topic, Key: r.K, Value: r.V, Timestamp: time.UnixMilli(r.T)}
		for _, header := range r.H {
			value, err := unbase64(header[1])
			if err != nil {
				return nil, err
			}
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: header[0], Value: value})
		}
		records = append(records, record)
	}
	return answer{}, client.ProduceSync(ctx, records...).FirstErr()
}

func unbase64(text string) (data []byte, err error) {
	err = json.Unmarshal([]byte(`"`+text+`"`), &data)
	return data, err
}

func readAt(
	ctx context.Context, servers kgo.Opt, asked request, at kgo.Offset, options ...kgo.Opt,
) (answer, error) {
	places := map[string]map[int32]kgo.Offset{asked.Topic: {0: at}}
	client, err := kgo.NewClient(append(options, servers, kgo.ConsumePartitions(places))...)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	count := asked.Count
	if asked.Op == "time" {
		count = 1
	}
	found, err := take(ctx, client, count)
	return answer{"records": items(found)}, err
}

func group(ctx context.Context, servers kgo.Opt, asked request) (answer, error) {
	client, err := kgo.NewClient(servers, kgo.ConsumerGroup(asked.Group), kgo.ConsumeTopics(asked.Topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit())
	if err != nil {
		return nil, err
	}
	defer client.Close()
	found, err := take(ctx, client, asked.Count)
	if err == nil {
		err = client.CommitRecords(ctx, found...)
	}
	return answer{"records": items(found)}, err
}

func take(ctx context.Context, client *kgo.Client, count int) ([]*kgo.Record, error) {
	var found []*kgo.Record
	for len(found) < count {
		fetches := client.PollRecords(ctx, count-len(found))
		if err := fetches.Err(); err != nil {
			return found, fmt.Errorf("%d of %d records came: %w", len(found), count, err)
		}
		found = append(found, fetches.Records()...)
	}
	return found, nil
}

func items(records []*kgo.Record) []item {
	out := []item{}
	for _, r := range records {
		headers := [][2]any{}
		for _, h := range r.Headers {
			headers = append(headers, [2]any{h.Key, h.Value})
		}
		out = append(out, item{r.Key, r.Value, r.Timestamp.UnixMilli(), headers, r.Offset, r.Partition})
	}
	return out
}
