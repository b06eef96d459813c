package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// etcdSystem puts one key per record, and watches the prefix.
type etcdSystem struct {
	client  *clientv3.Client
	servers []string
	prefix  string
	sent    atomic.Int64
}

func connectEtcd(servers []string, topic string) (System, error) {
	client, err := clientv3.New(clientv3.Config{Endpoints: servers, DialTimeout: 5 * time.Second})
	return &etcdSystem{client: client, servers: servers, prefix: topic + "/"}, err
}

func (e *etcdSystem) Make(context.Context, int) error { return nil } // a prefix needs no creation

func (e *etcdSystem) Send(ctx context.Context, value []byte) error {
	key := fmt.Sprintf("%s%p-%d", e.prefix, e, e.sent.Add(1))
	_, err := e.client.Put(ctx, key, string(value))
	return err
}

func (e *etcdSystem) Tail(ctx context.Context, ready func(), found func([]byte)) error {
	watched := e.client.Watch(ctx, e.prefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	for answer := range watched {
		if answer.Created {
			ready()
		}
		for _, event := range answer.Events {
			found(event.Kv.Value)
		}
	}
	return nil
}

func (e *etcdSystem) Commit(ctx context.Context, offset int64) error {
	_, err := e.client.Put(ctx, e.prefix+"position", fmt.Sprint(offset))
	return err
}

func (e *etcdSystem) Leader(ctx context.Context) (int, error) {
	for i, server := range e.servers {
		status, err := e.client.Status(ctx, server)
		if err == nil && status.Header.MemberId == status.Leader {
			return i, nil
		}
	}
	return 0, fmt.Errorf("no server says that it leads")
}

func (e *etcdSystem) Close() { _ = e.client.Close() }
