package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"sort"
	"sync"
	"time"
)

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// closedLoop acts again and again, and returns how long each act took after the warm-up.
func closedLoop(o options, act func() error) ([]time.Duration, error) {
	warm := time.Now().Add(seconds(o.warmUp))
	end := warm.Add(seconds(o.seconds))
	var taken []time.Duration
	for {
		start := time.Now()
		if !start.Before(end) {
			return taken, nil
		}
		if err := act(); err != nil {
			return nil, err
		}
		if !start.Before(warm) {
			taken = append(taken, time.Since(start))
		}
	}
}

func summary(taken []time.Duration, s float64) result {
	if len(taken) == 0 {
		return result{Seconds: s}
	}
	sort.Slice(taken, func(i, j int) bool { return taken[i] < taken[j] })
	at := func(percent float64) float64 {
		i := int(math.Ceil(float64(len(taken))*percent/100)) - 1
		return float64(taken[max(0, i)].Microseconds()) / 1000
	}
	return result{Count: len(taken), Seconds: s, P50: at(50), P99: at(99), Max: at(100)}
}

// withSystem connects, runs and closes.
func withSystem(o options, run func(System) (result, error)) (result, error) {
	system, err := connect(o)
	if err != nil {
		return result{}, err
	}
	defer system.Close()
	return run(system)
}

func makeTopic(ctx context.Context, o options) (result, error) {
	return withSystem(o, func(system System) (result, error) {
		return result{}, system.Make(ctx, o.partitions)
	})
}

// single sends one record at a time.
func single(ctx context.Context, o options) (result, error) {
	return withSystem(o, func(system System) (result, error) {
		value := make([]byte, o.size)
		taken, err := closedLoop(o, func() error { return system.Send(ctx, value) })
		return summary(taken, o.seconds), err
	})
}

// commit stores one position at a time.
func commit(ctx context.Context, o options) (result, error) {
	return withSystem(o, func(system System) (result, error) {
		offset := int64(0)
		taken, err := closedLoop(o, func() error {
			offset++
			return system.Commit(ctx, offset)
		})
		return summary(taken, o.seconds), err
	})
}

// manyClients has one record in flight per client. Each client has connections of its own.
func manyClients(ctx context.Context, o options) (result, error) {
	systems := make([]System, o.clients)
	for i := range systems {
		system, err := connect(o)
		if err != nil {
			return result{}, err
		}
		defer system.Close()
		systems[i] = system
	}
	var all []time.Duration
	var failed error
	var mutex sync.Mutex
	var group sync.WaitGroup
	for _, system := range systems {
		group.Add(1)
		go func() {
			defer group.Done()
			value := make([]byte, o.size)
			taken, err := closedLoop(o, func() error { return system.Send(ctx, value) })
			mutex.Lock()
			defer mutex.Unlock()
			all = append(all, taken...)
			if failed == nil {
				failed = err
			}
		}()
	}
	group.Wait()
	return summary(all, o.seconds), failed
}

// tail sends at a steady rate. A record's latency runs from the time at which it was due until the reader has it.
func tail(ctx context.Context, o options) (result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	reader, err := connect(o)
	if err != nil {
		return result{}, err
	}
	defer reader.Close()
	began := time.Now()
	total := int((o.warmUp + o.seconds) * float64(o.rate))
	skipped := int(o.warmUp * float64(o.rate))
	ready, found := make(chan struct{}), make(chan time.Duration, total)
	go func() {
		_ = reader.Tail(ctx, func() { close(ready) }, func(value []byte) {
			if len(value) < 16 || binary.BigEndian.Uint64(value) < uint64(skipped) {
				return
			}
			found <- time.Since(began) - time.Duration(binary.BigEndian.Uint64(value[8:]))
		})
	}()
	select {
	case <-ready:
	case <-time.After(30 * time.Second):
		return result{}, fmt.Errorf("the reader is not ready after 30 s")
	}
	return withSystem(o, func(system System) (result, error) {
		first, failed := time.Since(began), make(chan error, total)
		for i := range total {
			due := first + time.Duration(i)*time.Second/time.Duration(o.rate)
			time.Sleep(due - time.Since(began))
			value := make([]byte, max(16, o.size))
			binary.BigEndian.PutUint64(value, uint64(i))
			binary.BigEndian.PutUint64(value[8:], uint64(due))
			go func() {
				if err := system.Send(ctx, value); err != nil {
					failed <- err
				}
			}()
		}
		var taken []time.Duration
		for len(taken) < total-skipped {
			select {
			case latency := <-found:
				taken = append(taken, latency)
			case err := <-failed:
				return result{}, err
			case <-time.After(30 * time.Second):
				return result{}, fmt.Errorf("%d of %d records came", len(taken), total-skipped)
			}
		}
		return summary(taken, o.seconds), nil
	})
}

// consume reads `count` records from the beginning.
func consume(ctx context.Context, o options) (result, error) {
	return withSystem(o, func(system System) (result, error) {
		reader, can := system.(interface {
			Read(ctx context.Context, count int) (int64, error)
		})
		if !can {
			return result{}, fmt.Errorf("the driver of %s does not read from the beginning", o.system)
		}
		began := time.Now()
		size, err := reader.Read(ctx, o.count)
		return result{Count: o.count, Seconds: time.Since(began).Seconds(), Bytes: size}, err
	})
}

// gap sends one record at a time, names the leader on standard error for the caller to kill, and returns the longest
// time without an acknowledgement. A send that fails is sent again.
func gap(ctx context.Context, o options) (result, error) {
	return withSystem(o, func(system System) (result, error) {
		value, leader := make([]byte, o.size), 0
		if err := system.Send(ctx, value); err != nil {
			return result{}, err
		}
		leader, err := system.Leader(ctx)
		if err != nil {
			return result{}, err
		}
		fmt.Fprintf(os.Stderr, "leader %d\n", leader)
		longest, last := time.Duration(0), time.Now()
		for end := last.Add(seconds(o.seconds)); time.Now().Before(end); {
			attempt, cancel := context.WithTimeout(ctx, time.Second)
			err := system.Send(attempt, value)
			cancel()
			if err != nil {
				time.Sleep(5 * time.Millisecond)
				continue
			}
			longest, last = max(longest, time.Since(last)), time.Now()
		}
		longest = max(longest, time.Since(last))
		return result{Seconds: o.seconds, Gap: float64(longest.Microseconds()) / 1000}, nil
	})
}
