package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/riverlog"
	"github.com/riverqueue/river/rivertype"
)

const conformHelp = `The kind "conform" has the args message, behavior, duration_ms and output.
Its behavior is a list of steps, separated by spaces. Steps that continue:
  signal     wait for the job's message on standard input (a line {"release": MESSAGE}), or end
             with the error of the context
  insist     wait for the same, even if the context ends
  sleep      wait for duration_ms, or end with the error of the context
  swallow    wait for duration_ms, even if the context ends
  cancelled  wait until the context ends, then continue; prints the event "cancel_noticed"
  first      end here, without an error, unless this is the first attempt
  effect     insert the job's id and attempt into the table "effects" of the schema
  output     record output, or {"n": 1}
  reserved   set one of River's metadata keys
  log        write the message to the job's log (flag -job-log)
  complete   complete the job in a transaction of the worker
  print      print the event "effect" with the message
Steps that end: return, fail (an error of the message), panic, cancel, snooze (by duration_ms),
snooze-once (the same, but only if the metadata count no snooze yet; otherwise it continues) and
end (with the error of the context). A job without steps, or after the last one, returns.
Its retry policy and timeout are the client's, unless its metadata say otherwise (retry_ms, until,
timeout_ms).`

// conformArgs are the args of the kind "conform".
type conformArgs struct {
	Message    string          `json:"message"`
	Behavior   string          `json:"behavior"`
	DurationMs int             `json:"duration_ms"`
	Output     json.RawMessage `json:"output,omitempty"`
}

func (conformArgs) Kind() string { return "conform" }

// releases are the messages whose jobs are released.
type releases struct {
	mutex    sync.Mutex
	channels map[string]chan struct{}
}

// of returns the channel that is closed when the message is released.
func (r *releases) of(message string) chan struct{} {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	channel, ok := r.channels[message]
	if !ok {
		channel = make(chan struct{})
		r.channels[message] = channel
	}
	return channel
}

// read releases what standard input names, once each, until it ends.
func (r *releases) read(input io.Reader) {
	released := map[string]bool{}
	for lines := bufio.NewScanner(input); lines.Scan(); {
		var line struct {
			Release string `json:"release"`
			queueChange
		}
		if json.Unmarshal(lines.Bytes(), &line) != nil {
			continue
		}
		if line.Do != "" {
			queueChanges <- line.queueChange
			continue
		}
		if released[line.Release] {
			continue
		}
		released[line.Release] = true
		close(r.of(line.Release))
	}
}

// conformWorker works the kind "conform".
type conformWorker struct {
	river.WorkerDefaults[conformArgs]
	out      *output
	pool     *pgxpool.Pool
	schema   string
	releases *releases
}

// optionalKinds add kinds that need a new version of River.
var optionalKinds []func(*river.Workers, *conformWorker)

func addConform(workers *river.Workers, base *base) {
	worker := &conformWorker{
		out: base.out, pool: base.pool, schema: base.schema,
		releases: &releases{channels: map[string]chan struct{}{}},
	}
	go worker.releases.read(os.Stdin)
	river.AddWorker(workers, worker)
	for _, add := range optionalKinds {
		add(workers, worker)
	}
}

func (w *conformWorker) NextRetry(job *river.Job[conformArgs]) time.Time {
	settings := workerSettingsOf(job.Metadata)
	switch {
	case job.Attempt < settings.Until:
		return time.Now()
	case settings.RetryMs != 0:
		return time.Now().Add(time.Duration(settings.RetryMs) * time.Millisecond)
	}
	return time.Time{} // the client's policy
}

func (w *conformWorker) Timeout(job *river.Job[conformArgs]) time.Duration {
	if ms := workerSettingsOf(job.Metadata).TimeoutMs; ms > 0 {
		return time.Duration(ms) * time.Millisecond
	} else if ms < 0 {
		return -1
	}
	return 0
}

// errDone ends a job without more steps.
var errDone = errors.New("done")

func (w *conformWorker) Work(ctx context.Context, job *river.Job[conformArgs]) error {
	err := w.print(job, "job_started")
	for _, step := range strings.Fields(job.Args.Behavior) {
		if err != nil {
			break
		}
		err = w.do(ctx, job, step)
	}
	if errors.Is(err, errDone) {
		return nil
	}
	return err
}

func (w *conformWorker) print(job *river.Job[conformArgs], event string) error {
	return w.out.print(map[string]any{
		"event": event, "id": job.ID, "kind": job.Kind, "attempt": job.Attempt,
		"message": job.Args.Message,
	})
}

func (w *conformWorker) do(ctx context.Context, job *river.Job[conformArgs], step string) error {
	released := w.releases.of(job.Args.Message)
	duration := time.Duration(job.Args.DurationMs) * time.Millisecond
	switch step {
	case "signal":
		return wait(ctx, released)
	case "insist":
		<-released
	case "sleep":
		return wait(ctx, time.After(duration))
	case "swallow":
		time.Sleep(duration)
	case "cancelled":
		<-ctx.Done()
		return w.print(job, "cancel_noticed")
	case "first":
		if job.Attempt > 1 {
			return errDone
		}
	case "effect":
		return w.insertEffect(ctx, job)
	case "print":
		return w.print(job, "effect")
	case "output":
		return recordOr(ctx, job.Args.Output, json.RawMessage(`{"n":1}`))
	case "reserved":
		return river.MetadataSet(ctx, "river:mine", 1)
	case "log":
		riverlog.Logger(ctx).InfoContext(ctx, job.Args.Message)
	case "complete":
		return w.complete(ctx, job)
	default:
		return ending(ctx, job, step, duration)
	}
	return nil
}

// ending does one of the steps that end a job.
func ending(
	ctx context.Context, job *river.Job[conformArgs], step string, duration time.Duration,
) error {
	switch step {
	case "return":
		return errDone
	case "fail":
		return errors.New(job.Args.Message)
	case "panic":
		panic(job.Args.Message)
	case "cancel":
		return river.JobCancel(errors.New(job.Args.Message))
	case "snooze":
		return river.JobSnooze(duration)
	case "snooze-once":
		if workerSettingsOf(job.Metadata).Snoozes > 0 {
			return nil
		}
		return river.JobSnooze(duration)
	case "end":
		return ctx.Err()
	}
	return fmt.Errorf("no such step: %q", step)
}

// wait returns when the channel answers, or with the error of the context.
func wait[T any](ctx context.Context, channel <-chan T) error {
	select {
	case <-channel:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func recordOr(ctx context.Context, output, other json.RawMessage) error {
	if output == nil {
		output = other
	}
	return river.RecordOutput(ctx, output)
}

func (w *conformWorker) insertEffect(ctx context.Context, job *river.Job[conformArgs]) error {
	table := pgx.Identifier{w.schema, "effects"}.Sanitize()
	_, err := w.pool.Exec(ctx,
		"INSERT INTO "+table+" (job_id, attempt, language) VALUES ($1, $2, 'go')",
		job.ID, job.Attempt)
	return err
}

func (w *conformWorker) complete(ctx context.Context, job *river.Job[conformArgs]) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
		return err
	})
}

// jobLog is the middleware that stores what jobs log, as lines of text without times.
func jobLog() rivertype.Middleware {
	return riverlog.NewMiddleware(func(w io.Writer) slog.Handler {
		return slog.NewTextHandler(w, &slog.HandlerOptions{
			ReplaceAttr: func(_ []string, attr slog.Attr) slog.Attr {
				if attr.Key == slog.TimeKey {
					return slog.Attr{}
				}
				return attr
			},
		})
	}, nil)
}

// errorHandler prints each failure as the event "error_handler" and then does what its flag says.
type errorHandler struct {
	out *output
	do  string
}

func (h *errorHandler) HandleError(
	_ context.Context, job *rivertype.JobRow, err error,
) *river.ErrorHandlerResult {
	return h.handle(job, err.Error(), false)
}

func (h *errorHandler) HandlePanic(
	_ context.Context, job *rivertype.JobRow, value any, _ string,
) *river.ErrorHandlerResult {
	return h.handle(job, fmt.Sprint(value), true)
}

func (h *errorHandler) handle(
	job *rivertype.JobRow, text string, isPanic bool,
) *river.ErrorHandlerResult {
	_ = h.out.print(map[string]any{
		"event": "error_handler", "id": job.ID, "attempt": job.Attempt, "state": job.State,
		"error": text, "panic": isPanic,
	})
	if h.do == "panic" {
		panic("the error handler fails")
	}
	return &river.ErrorHandlerResult{SetCancelled: h.do == "cancel"}
}

// reportStuck prints each stuck job as the event "job_stuck".
func reportStuck(out *output) river.JobStuckHandler {
	return func(_ context.Context, params river.JobStuckHandlerParams) river.JobStuckHandlerResult {
		_ = out.print(map[string]any{
			"event": "job_stuck", "id": params.ID, "kind": params.Kind, "queue": params.Queue,
			"total": params.TotalStuckJobs,
		})
		return river.JobStuckHandlerResult{}
	}
}
