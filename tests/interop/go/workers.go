package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
)

// task is the args of every kind that the worker knows.
type task struct {
	kind string

	Msg       string          `json:"msg"`        // text of a failure, panic or cancellation
	Ms        int             `json:"ms"`         // milliseconds to sleep or snooze
	IgnoreCtx bool            `json:"ignore_ctx"` // ignore a cancellation of the sleep
	Then      string          `json:"then"`       // the step after the sleep
	Output    json.RawMessage `json:"output"`     // the output to record
}

func (t task) Kind() string { return t.kind }

// worker works one kind by one of the functions below.
type worker struct {
	river.WorkerDefaults[task]
	out        *output
	retryAfter time.Duration
	work       func(context.Context, *river.Job[task]) error
}

func (w *worker) Work(ctx context.Context, job *river.Job[task]) error {
	err := w.out.print(map[string]any{
		"event": "job_started", "id": job.ID, "kind": job.JobRow.Kind, "attempt": job.Attempt,
	})
	if err != nil {
		return err
	}
	return w.work(ctx, job)
}

// workerSettings are settings for the worker in a job's metadata.
type workerSettings struct {
	RetryMs   int `json:"retry_ms"`   // the pause after a failed attempt
	Snoozes   int `json:"snoozes"`    // River's count
	TimeoutMs int `json:"timeout_ms"` // the job's timeout
	Until     int `json:"until"`      // retries before this attempt are immediate
}

func workerSettingsOf(metadata []byte) (w workerSettings) {
	_ = json.Unmarshal(metadata, &w) // metadata of another form have no settings
	return w
}

func (w *worker) NextRetry(job *river.Job[task]) time.Time {
	settings := workerSettingsOf(job.Metadata)
	switch {
	case job.Attempt < settings.Until:
		return time.Now()
	case settings.RetryMs > 0:
		return time.Now().Add(time.Duration(settings.RetryMs) * time.Millisecond)
	}
	return time.Now().Add(w.retryAfter)
}

func (w *worker) Timeout(job *river.Job[task]) time.Duration {
	return time.Duration(workerSettingsOf(job.Metadata).TimeoutMs) * time.Millisecond
}

// workersOf registers all kinds; those with "rig_" are the kinds of the recorded scenarios.
func workersOf(base *base, retryAfter time.Duration) *river.Workers {
	workers := river.NewWorkers()
	add := func(work func(context.Context, *river.Job[task]) error, kinds ...string) {
		for _, kind := range kinds {
			river.AddWorkerArgs(workers, task{kind: kind},
				&worker{out: base.out, retryAfter: retryAfter, work: work})
		}
	}
	add(cancel, "cancel", "rig_cancel")
	add(completeTx(base.pool), "complete_tx")
	add(echo, "echo")
	add(fail, "fail", "rig_fail")
	add(noop, "noop", "rig_echo")
	add(recordOutput, "output", "rig_output")
	add(panics, "panic", "rig_panic")
	add(sleep, "sleep", "rig_sleep")
	add(snooze, "snooze", "rig_snooze")
	return workers
}

func noop(context.Context, *river.Job[task]) error { return nil }

// echo records its args as its output.
func echo(ctx context.Context, job *river.Job[task]) error {
	return river.RecordOutput(ctx, json.RawMessage(job.EncodedArgs))
}

// completeTx completes the job in a transaction of its own code.
func completeTx(pool *pgxpool.Pool) func(context.Context, *river.Job[task]) error {
	return func(ctx context.Context, job *river.Job[task]) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
			return err
		})
	}
}

func recordOutput(ctx context.Context, job *river.Job[task]) error {
	if job.Args.Output != nil {
		return river.RecordOutput(ctx, job.Args.Output)
	}
	return river.RecordOutput(ctx, map[string]any{"hello": "world", "n": 1})
}

func fail(_ context.Context, job *river.Job[task]) error { return errors.New(job.Args.Msg) }

func panics(_ context.Context, job *river.Job[task]) error { panic(job.Args.Msg) }

func cancel(_ context.Context, job *river.Job[task]) error {
	return river.JobCancel(errors.New(job.Args.Msg))
}

func snooze(_ context.Context, job *river.Job[task]) error {
	return river.JobSnooze(time.Duration(job.Args.Ms) * time.Millisecond)
}

// sleep ends early with its context, as a failure unless its args say otherwise.
func sleep(ctx context.Context, job *river.Job[task]) error {
	select {
	case <-time.After(time.Duration(job.Args.Ms) * time.Millisecond):
	case <-ctx.Done():
		if !job.Args.IgnoreCtx {
			return fmt.Errorf("ctx: %w (cause: %w)", ctx.Err(), context.Cause(ctx))
		}
	}
	switch job.Args.Then {
	case "fail":
		return errors.New("failed after sleep")
	case "panic":
		panic("panic after sleep")
	case "snooze":
		return river.JobSnooze(time.Hour)
	case "cancel":
		return river.JobCancel(errors.New("cancel after sleep"))
	}
	return nil
}
