// Publishes three events over gRPC, and reads them back from their offsets.
//
//	./generate.sh
//	go run . 127.0.0.1:7401 events
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	pb "events/smqpb"
)

var values = []string{"started", "changed", "ended"}

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func run(server, topic string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	anyNode, err := connect(server)
	if err != nil {
		return err
	}
	defer anyNode.Close()
	if err := createTopic(ctx, pb.NewAdminClient(anyNode), topic); err != nil {
		return err
	}
	address, err := leaderOf(ctx, pb.NewAdminClient(anyNode), topic)
	if err != nil {
		return err
	}
	leader, err := connect(address)
	if err != nil {
		return err
	}
	defer leader.Close()
	offset, err := publish(ctx, pb.NewAgentClient(leader), topic)
	if err != nil {
		return err
	}
	return read(ctx, pb.NewAgentClient(leader), topic, offset)
}

func connect(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// createTopic may be repeated with the same request id: it takes effect once.
func createTopic(ctx context.Context, admin pb.AdminClient, topic string) error {
	var trailer metadata.MD
	request := &pb.CreateTopicRequest{Name: topic, PartitionCount: 1, RequestId: newID()}
	_, err := admin.CreateTopic(ctx, request, grpc.Trailer(&trailer))
	if found := detail(trailer); found.GetName() == "TOPIC_EXISTS" {
		return nil
	}
	return err
}

// leaderOf returns the address of the node that takes the records of partition 0. A new topic has a leader soon.
func leaderOf(ctx context.Context, admin pb.AdminClient, topic string) (string, error) {
	for {
		found, err := admin.DescribeCluster(ctx, &pb.DescribeClusterRequest{Topics: []string{topic}, Linearizable: true})
		if err != nil {
			return "", err
		}
		partition := found.Topics[0].Partitions[0]
		for _, node := range found.Nodes {
			if node.Node == partition.Leader && partition.LeaderAvailable {
				return node.GrpcAddress, nil
			}
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// publish sends the events as one batch, and returns the offset of the first. The session makes it idempotent: the same
// records with the same base_sequence are stored once.
func publish(ctx context.Context, agent pb.AgentClient, topic string) (int64, error) {
	session := fmt.Sprintf("%x", newID())
	opened := &pb.StartPublishSessionRequest{SessionId: session, Topic: topic, RequestId: newID()}
	if _, err := agent.StartPublishSession(ctx, opened); err != nil {
		return 0, err
	}
	stream, err := agent.PublishRecord(ctx)
	if err != nil {
		return 0, err
	}
	records := &pb.NewRecords{}
	for _, value := range values {
		records.Records = append(records.Records, &pb.NewRecord{Key: []byte("job-7"), Value: []byte(value)})
	}
	err = stream.Send(&pb.PublishRecordRequest{
		SessionId:    session,
		Partition:    proto.Int32(0),
		BaseSequence: proto.Int32(0),
		Payload:      &pb.PublishRecordRequest_Records{Records: records},
	})
	if err != nil {
		return 0, err
	}
	answer, err := stream.Recv()
	if err != nil {
		return 0, err
	}
	if failed := answer.Error; failed != nil {
		return 0, fmt.Errorf("%s: %s; %s", failed.Name, failed.Message, failed.Advice)
	}
	fmt.Printf("stored at %d to %d\n", answer.BaseOffset, answer.LastOffset)
	return answer.BaseOffset, stream.CloseSend()
}

// read prints what lies between the offset and the present end.
func read(ctx context.Context, agent pb.AgentClient, topic string, offset int64) error {
	stream, err := agent.SubscribeRecord(ctx)
	if err != nil {
		return err
	}
	err = stream.Send(&pb.SubscribeRecordRequest{Kind: &pb.SubscribeRecordRequest_Init{Init: &pb.SubscribeInit{
		SubscriptionId: fmt.Sprintf("%x", newID()),
		Topic:          topic,
		Partition:      proto.Int32(0),
		OffsetType:     pb.OffsetType_EXACT_OFFSET,
		OffsetValue:    proto.Int64(offset),
		StopAtEnd:      true,
	}}})
	if err != nil {
		return err
	}
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			if found := detail(stream.Trailer()); found != nil {
				return fmt.Errorf("%s: %s; %s", found.Name, found.Message, found.Advice)
			}
			return err
		}
		for _, record := range answer.Records {
			fmt.Printf("%d %s: %s\n", record.Offset, record.Key, record.Value)
		}
	}
}

// detail returns what smq says about an error, with its name, its advice, and whether it is definite.
func detail(trailer metadata.MD) *pb.ErrorDetail {
	found := &pb.ErrorDetail{}
	for _, data := range trailer.Get("smq-error-bin") {
		if proto.Unmarshal([]byte(data), found) == nil {
			return found
		}
	}
	return nil
}

func newID() []byte {
	id := make([]byte, 16)
	rand.Read(id) // it never fails
	return id
}
