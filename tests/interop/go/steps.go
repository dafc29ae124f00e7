package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
)

// Older versions of River have other steps or none: scripts/interop leaves this file out for them.
func init() { optionalKinds = append(optionalKinds, addSteps) }

// stepArgs are the args of the kind "steps", whose job has resumable steps.
//
// Each step prints the event "step" with its name and its cursor, and then does what Does says,
// words separated by spaces. NAME@N does it only at attempt N.
//
//	set=JSON     set the cursor
//	tx=MODE      commit or rollback a transaction that stores the step, with the cursor if one was
//	             set, or "begin" and then fail
//	signal       wait for the job's message, or end with the error of the context
//	nest         run a step inside of this one
//	fail, panic, cancel, snooze-once, end    as in the kind "conform"
//
// Then is done after the last step, in the same words, outside of any step.
type stepArgs struct {
	Message string     `json:"message"`
	Steps   []stepSpec `json:"steps"`
	Then    string     `json:"then"`
}

type stepSpec struct {
	Name   string `json:"name"`
	Cursor string `json:"cursor"` // the type: "", "any" or "int"
	Does   string `json:"does"`
}

func (stepArgs) Kind() string { return "steps" }

type stepWorker struct {
	river.WorkerDefaults[stepArgs]
	conform *conformWorker
}

func addSteps(workers *river.Workers, conform *conformWorker) {
	river.AddWorker(workers, &stepWorker{conform: conform})
}

func (w *stepWorker) NextRetry(job *river.Job[stepArgs]) time.Time {
	if ms := workerSettingsOf(job.Metadata).RetryMs; ms != 0 {
		return time.Now().Add(time.Duration(ms) * time.Millisecond)
	}
	return time.Now()
}

func (w *stepWorker) Work(ctx context.Context, job *river.Job[stepArgs]) error {
	_ = w.print(job, "job_started", nil)
	for _, step := range job.Args.Steps {
		run := stepRun{worker: w, job: job, step: step}
		switch step.Cursor {
		case "":
			river.ResumableStep(ctx, step.Name, nil, func(ctx context.Context) error {
				return run.do(ctx, nil)
			})
		case "any":
			river.ResumableStepCursor(ctx, step.Name, nil,
				func(ctx context.Context, cursor json.RawMessage) error {
					return run.do(ctx, cursor)
				})
		case "int":
			river.ResumableStepCursor(ctx, step.Name, nil,
				func(ctx context.Context, cursor int) error { return run.do(ctx, cursor) })
		}
	}
	run := stepRun{worker: w, job: job}
	return run.words(ctx, job.Args.Then)
}

func (w *stepWorker) print(job *river.Job[stepArgs], event string, more map[string]any) error {
	line := map[string]any{"event": event, "id": job.ID, "attempt": job.Attempt}
	for key, value := range more {
		line[key] = value
	}
	return w.conform.out.print(line)
}

// stepRun is one step of one attempt.
type stepRun struct {
	worker *stepWorker
	job    *river.Job[stepArgs]
	step   stepSpec
	cursor json.RawMessage // the last one that was set
}

func (r *stepRun) do(ctx context.Context, cursor any) error {
	_ = r.worker.print(r.job, "step", map[string]any{"name": r.step.Name, "cursor": cursor})
	return r.words(ctx, r.step.Does)
}

func (r *stepRun) words(ctx context.Context, words string) error {
	for _, word := range strings.Fields(words) {
		word, attempt, isLimited := strings.Cut(word, "@")
		if isLimited && attempt != strconv.Itoa(r.job.Attempt) {
			continue
		}
		if err := r.word(ctx, word); err != nil {
			return err
		}
	}
	return nil
}

func (r *stepRun) word(ctx context.Context, word string) error {
	name, value, _ := strings.Cut(word, "=")
	switch name {
	case "set":
		r.cursor = json.RawMessage(value)
		return river.ResumableSetCursor(ctx, r.cursor)
	case "tx":
		return r.inTransaction(ctx, value)
	case "signal":
		return wait(ctx, r.worker.conform.releases.of(r.job.Args.Message))
	case "nest":
		river.ResumableStep(ctx, "nested", nil, func(context.Context) error { return nil })
		return nil
	case "fail":
		return errors.New(r.job.Args.Message)
	case "panic":
		panic(r.job.Args.Message)
	case "cancel":
		return river.JobCancel(errors.New(r.job.Args.Message))
	case "snooze-once":
		if workerSettingsOf(r.job.Metadata).Snoozes > 0 {
			return nil
		}
		return river.JobSnooze(time.Hour)
	case "end":
		return ctx.Err()
	}
	return fmt.Errorf("no such word: %q", word)
}

func (r *stepRun) inTransaction(ctx context.Context, mode string) error {
	tx, err := r.worker.conform.pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if err := r.store(ctx, tx); err != nil {
		return err
	}
	if mode == "commit" {
		return tx.Commit(ctx)
	}
	return nil
}

func (r *stepRun) store(ctx context.Context, tx pgx.Tx) (err error) {
	if r.cursor == nil {
		_, err = river.ResumableSetStepTx[*riverpgxv5.Driver](ctx, tx, r.job)
	} else {
		_, err = river.ResumableSetStepCursorTx[*riverpgxv5.Driver](ctx, tx, r.job, r.cursor)
	}
	return err
}
