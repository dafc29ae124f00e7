package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
)

const (
	benchBatch    = 5_000
	benchCallers  = 100
	pickupPause   = 20 * time.Millisecond
	pickupTimeout = 10 * time.Second
)

// benchVerb makes the measurements that its flags select, one after the other, and prints one object. The
// tables should be empty. Fetching is set as in River's own benchmark: a cooldown of 2 ms and a
// poll every 20 ms; the measurement of pickup has River's defaults.
func benchVerb(flags *flag.FlagSet) func(context.Context, *base) error {
	jobs := flags.Int("jobs", 0, "jobs to insert beforehand and work")
	slots := flags.Int("slots", 2_000, "most jobs at once")
	serve := flags.Int("serve", 0, "most jobs at once of a client that works until SIGTERM")
	queues := flags.String("queues", "", "queues of --serve with their slots, as q0:3,q1:2; default: --serve in one queue")
	pickups := flags.Int("pickup", 0, "inserts, each 20 ms, into an idle client")
	one := flags.Int("insert-one", 0, "jobs to insert one at a time")
	callers := flags.Int("insert-100-callers", 0, "jobs to insert by 100 goroutines")
	many := flags.Int("insert-many", 0, "jobs to insert by InsertMany")
	fast := flags.Int("insert-fast", 0, "jobs to insert by InsertManyFast")
	return func(ctx context.Context, base *base) error {
		bench := &bench{base: base, results: map[string]float64{}}
		steps := []struct {
			count int
			run   func(context.Context, int) error
		}{
			{*one, bench.insertOne},
			{*callers, bench.insertCallers},
			{*many, bench.insertMany},
			{*fast, bench.insertFast},
			{*jobs, func(ctx context.Context, jobs int) error { return bench.work(ctx, jobs, *slots) }},
			{*pickups, bench.pickup},
			{*serve, func(ctx context.Context, slots int) error { return bench.serve(ctx, slots, *queues) }},
		}
		for _, step := range steps {
			if step.count == 0 {
				continue
			}
			if err := step.run(ctx, step.count); err != nil {
				return err
			}
		}
		return base.out.print(bench.results)
	}
}

type bench struct {
	base    *base
	results map[string]float64
}

// benchArgs number their jobs.
type benchArgs struct {
	N int `json:"n"`
}

func (benchArgs) Kind() string { return "bench" }

// benchWorker sends the start time of a job to a channel, if there is one.
type benchWorker struct {
	river.WorkerDefaults[benchArgs]
	began chan<- time.Time
}

func (w *benchWorker) Work(context.Context, *river.Job[benchArgs]) error {
	if w.began != nil {
		w.began <- time.Now()
	}
	return nil
}

// noopArgs are args of jobs that another program inserted.
type noopArgs struct{}

func (noopArgs) Kind() string { return "noop" }

type noopWorker struct{ river.WorkerDefaults[noopArgs] }

func (*noopWorker) Work(context.Context, *river.Job[noopArgs]) error { return nil }

func benchParams(first, count int, queue string) []river.InsertManyParams {
	params := make([]river.InsertManyParams, count)
	for i := range params {
		params[i] = river.InsertManyParams{
			Args: benchArgs{N: first + i}, InsertOpts: &river.InsertOpts{Queue: queue},
		}
	}
	return params
}

func (b *bench) rate(name string, count int, began time.Time) {
	b.results[name] = float64(count) / time.Since(began).Seconds()
}

func (b *bench) insertOne(ctx context.Context, count int) error {
	client, err := b.base.inserter()
	if err != nil {
		return err
	}
	began := time.Now()
	for i := range count {
		opts := &river.InsertOpts{Queue: "bench_insert"}
		if _, err := client.Insert(ctx, benchArgs{N: i}, opts); err != nil {
			return err
		}
	}
	b.rate("insert_one", count, began)
	return nil
}

func (b *bench) insertCallers(ctx context.Context, count int) error {
	client, err := b.base.inserter()
	if err != nil {
		return err
	}
	numbers := make(chan int)
	failures := make(chan error, benchCallers)
	began := time.Now()
	for range benchCallers {
		go func() {
			var failure error
			for i := range numbers {
				opts := &river.InsertOpts{Queue: "bench_insert"}
				if _, err := client.Insert(ctx, benchArgs{N: i}, opts); err != nil {
					failure = err
				}
			}
			failures <- failure
		}()
	}
	for i := range count {
		numbers <- i
	}
	close(numbers)
	for range benchCallers {
		if err := <-failures; err != nil {
			return err
		}
	}
	b.rate("insert_100_callers", count, began)
	return nil
}

func (b *bench) insertMany(ctx context.Context, count int) error {
	client, err := b.base.inserter()
	if err != nil {
		return err
	}
	began := time.Now()
	if _, err := client.InsertMany(ctx, benchParams(0, count, "bench_insert")); err != nil {
		return err
	}
	b.rate("insert_many", count, began)
	return nil
}

func (b *bench) insertFast(ctx context.Context, count int) error {
	client, err := b.base.inserter()
	if err != nil {
		return err
	}
	began := time.Now()
	if _, err := client.InsertManyFast(ctx, benchParams(0, count, "bench_insert")); err != nil {
		return err
	}
	b.rate("insert_fast", count, began)
	return nil
}

// work inserts the jobs, then times a client from its start until the event of the last job.
func (b *bench) work(ctx context.Context, jobs, slots int) error {
	inserter, err := b.base.inserter()
	if err != nil {
		return err
	}
	for first := 0; first < jobs; first += benchBatch {
		params := benchParams(first, min(benchBatch, jobs-first), river.QueueDefault)
		if _, err := inserter.InsertManyFast(ctx, params); err != nil {
			return err
		}
	}
	client, err := b.fastClient(map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: slots}})
	if err != nil {
		return err
	}
	events, unsubscribe := client.SubscribeConfig(&river.SubscribeConfig{
		ChanSize: jobs, Kinds: []river.EventKind{river.EventKindJobCompleted},
	})
	defer unsubscribe()
	began := time.Now()
	if err := client.Start(ctx); err != nil {
		return err
	}
	for range jobs {
		<-events
	}
	b.rate("work_per_s", jobs, began)
	return client.Stop(ctx)
}

// fastClient works any no-op job at the settings of River's own benchmark.
func (b *bench) fastClient(queues map[string]river.QueueConfig) (*river.Client[pgx.Tx], error) {
	workers := river.NewWorkers()
	river.AddWorker(workers, &benchWorker{})
	river.AddWorker(workers, &noopWorker{})
	return b.base.client(&river.Config{
		FetchCooldown:     2 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Queues:            queues,
		Workers:           workers,
	})
}

// serve works the jobs in the table until SIGTERM.
func (b *bench) serve(ctx context.Context, slots int, text string) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	if text == "" {
		text = fmt.Sprintf("%s:%d", river.QueueDefault, slots)
	}
	queues, err := queuesOf(text)
	if err != nil {
		return err
	}
	client, err := b.fastClient(queues)
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	<-signals
	return client.Stop(ctx)
}

// pickup measures milliseconds from before an insert until the job's code runs.
func (b *bench) pickup(ctx context.Context, count int) error {
	began := make(chan time.Time, 1)
	workers := river.NewWorkers()
	river.AddWorker(workers, &benchWorker{began: began})
	client, err := b.base.client(&river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 100}},
		Workers: workers,
	})
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	waits := make([]float64, 0, count)
	for i := range count {
		inserted := time.Now()
		if _, err := client.Insert(ctx, benchArgs{N: i}, nil); err != nil {
			return err
		}
		select {
		case at := <-began:
			waits = append(waits, float64(at.Sub(inserted).Microseconds())/1_000)
		case <-time.After(pickupTimeout):
			return fmt.Errorf("job %d did not start within %s", i, pickupTimeout)
		}
		time.Sleep(time.Until(inserted.Add(pickupPause)))
	}
	slices.Sort(waits)
	b.results["pickup_p50_ms"] = waits[count/2]
	b.results["pickup_p99_ms"] = waits[count*99/100]
	return client.Stop(ctx)
}
