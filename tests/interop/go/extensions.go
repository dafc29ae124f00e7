package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"sync"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

const extensionsHelp = `Reads lines {"fail": PLACE}. For each it inserts a job and works it, with two
middleware and two hooks of the client and one of each of the job, which note where they are called;
at PLACE they fail. Prints where they were called, and how it ended.`

// places are where extensions were called, in order.
type places struct {
	mutex  sync.Mutex
	called []string
	fail   string
}

// at records a place, and fails there if the test says so.
func (p *places) at(place string) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.called = append(p.called, place)
	if place == p.fail {
		return errors.New(place + " fails")
	}
	return nil
}

// begin removes the recorded places, and sets the next place to fail at.
func (p *places) begin(fail string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.called, p.fail = []string{}, fail
}

func (p *places) all() []string {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.called
}

// extensionPlaces are the places of the only client of the process: River makes the args, and calls them
// for their hooks.
var extensionPlaces = &places{}

type extendedArgs struct{}

func (extendedArgs) Kind() string { return "extended" }

func (extendedArgs) Hooks() []rivertype.Hook {
	return []rivertype.Hook{&notingHook{name: "job's"}}
}

type extendedWorker struct {
	river.WorkerDefaults[extendedArgs]
}

func (extendedWorker) Middleware(*rivertype.JobRow) []rivertype.WorkerMiddleware {
	return []rivertype.WorkerMiddleware{&notingMiddleware{name: "job's"}}
}

func (extendedWorker) Work(context.Context, *river.Job[extendedArgs]) error {
	return extensionPlaces.at("code")
}

type notingHook struct {
	river.HookDefaults
	name string
}

func (h *notingHook) InsertBegin(context.Context, *rivertype.JobInsertParams) error {
	return extensionPlaces.at("insert_begin " + h.name)
}

func (h *notingHook) WorkBegin(context.Context, *rivertype.JobRow) error {
	return extensionPlaces.at("work_begin " + h.name)
}

func (h *notingHook) WorkEnd(_ context.Context, _ *rivertype.JobRow, err error) error {
	if failure := extensionPlaces.at("work_end " + h.name); failure != nil {
		return failure
	}
	return err
}

type notingMiddleware struct {
	river.MiddlewareDefaults
	name string
}

func (m *notingMiddleware) InsertMany(
	ctx context.Context, _ []*rivertype.JobInsertParams,
	doInner func(context.Context) ([]*rivertype.JobInsertResult, error),
) ([]*rivertype.JobInsertResult, error) {
	if err := extensionPlaces.at("insert before " + m.name); err != nil {
		return nil, err
	}
	results, err := doInner(ctx)
	if err != nil {
		return nil, err
	}
	return results, extensionPlaces.at("insert after " + m.name)
}

func (m *notingMiddleware) Work(
	ctx context.Context, _ *rivertype.JobRow, doInner func(context.Context) error,
) error {
	if err := extensionPlaces.at("work before " + m.name); err != nil {
		return err
	}
	if err := doInner(ctx); err != nil {
		return err
	}
	return extensionPlaces.at("work after " + m.name)
}

func extensionsVerb(flags *flag.FlagSet) func(context.Context, *base) error {
	usage(flags, extensionsHelp)
	return func(ctx context.Context, base *base) error {
		workers := river.NewWorkers()
		river.AddWorker(workers, &extendedWorker{})
		client, err := base.client(&river.Config{
			FetchCooldown: time.Millisecond,
			Hooks:         []rivertype.Hook{&notingHook{name: "1"}, &notingHook{name: "2"}},
			Middleware: []rivertype.Middleware{
				&notingMiddleware{name: "1"}, &notingMiddleware{name: "2"},
			},
			Queues:  map[string]river.QueueConfig{"default": {MaxWorkers: 1}},
			Workers: workers,
		})
		if err != nil {
			return err
		}
		events, unsubscribe := client.Subscribe(eventKinds()...)
		defer unsubscribe()
		if err := client.Start(ctx); err != nil {
			return err
		}
		for lines := json.NewDecoder(os.Stdin); ; {
			var line struct {
				Fail string `json:"fail"`
			}
			if err := lines.Decode(&line); errors.Is(err, io.EOF) {
				return client.Stop(ctx)
			} else if err != nil {
				return err
			}
			extensionPlaces.begin(line.Fail)
			if err := base.out.print(insertAndWork(ctx, client, events)); err != nil {
				return err
			}
		}
	}
}

// insertAndWork returns the end of a job's insert or attempt.
func insertAndWork(
	ctx context.Context, client *client, events <-chan *river.Event,
) map[string]any {
	_, err := client.Insert(ctx, extendedArgs{}, &river.InsertOpts{MaxAttempts: 1})
	if err != nil {
		return map[string]any{"called": extensionPlaces.all(), "refused": err.Error()}
	}
	job := (<-events).Job
	failures := []string{}
	for _, attempt := range job.Errors {
		failures = append(failures, attempt.Error)
	}
	return map[string]any{
		"called": extensionPlaces.all(), "state": job.State, "errors": failures,
	}
}
