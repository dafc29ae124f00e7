package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// request is one object of the verb's standard input.
type request struct {
	Struct string          `json:"struct"`
	Kind   string          `json:"kind"`
	Args   json.RawMessage `json:"args"`
	Opts   requestOpts     `json:"opts"`
	OfKind bool            `json:"of_kind"` // the options are those of the kind, not of the call
}

type requestOpts struct {
	MaxAttempts int             `json:"max_attempts"`
	Metadata    json.RawMessage `json:"metadata"`
	Pending     bool            `json:"pending"`
	Priority    int             `json:"priority"`
	Queue       string          `json:"queue"`
	ScheduledAt time.Time       `json:"scheduled_at"`
	Tags        []string        `json:"tags"`
	Unique      uniqueOpts      `json:"unique"`
}

type uniqueOpts struct {
	ByArgs      bool                 `json:"by_args"`
	ByPeriod    float64              `json:"by_period_s"`
	ByQueue     bool                 `json:"by_queue"`
	ByState     []rivertype.JobState `json:"by_state"`
	ExcludeKind bool                 `json:"exclude_kind"`
}

func (u *uniqueOpts) opts() river.UniqueOpts {
	return river.UniqueOpts{
		ByArgs:      u.ByArgs,
		ByPeriod:    time.Duration(u.ByPeriod * float64(time.Second)),
		ByQueue:     u.ByQueue,
		ByState:     u.ByState,
		ExcludeKind: u.ExcludeKind,
	}
}

// argsWithOpts are args whose kind has options of its own.
type argsWithOpts struct {
	river.JobArgs
	opts river.InsertOpts
}

func (a argsWithOpts) InsertOpts() river.InsertOpts { return a.opts }
func (a argsWithOpts) MarshalJSON() ([]byte, error) { return json.Marshal(a.JobArgs) }

// inserted is one line of its standard output.
type inserted struct {
	row
	EncodedArgs string `json:"encoded_args"`
	Skipped     bool   `json:"unique_skipped_as_duplicate"`
}

func (r *request) params() (river.InsertManyParams, error) {
	args, err := argsOf(r.Struct, r.Kind, r.Args)
	if err != nil {
		return river.InsertManyParams{}, err
	}
	opts := &river.InsertOpts{
		MaxAttempts: r.Opts.MaxAttempts,
		Metadata:    r.Opts.Metadata,
		Pending:     r.Opts.Pending,
		Priority:    r.Opts.Priority,
		Queue:       r.Opts.Queue,
		ScheduledAt: r.Opts.ScheduledAt,
		Tags:        r.Opts.Tags,
		UniqueOpts:  r.Opts.Unique.opts(),
	}
	if r.OfKind {
		return river.InsertManyParams{Args: argsWithOpts{args, *opts}}, nil
	}
	return river.InsertManyParams{Args: args, InsertOpts: opts}, nil
}

// requests calls `each` for every object of standard input when it arrives.
func requests(each func(params river.InsertManyParams, err error) error) error {
	decoder := json.NewDecoder(os.Stdin)
	for {
		var read request
		switch err := decoder.Decode(&read); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		if err := each(read.params()); err != nil {
			return err
		}
	}
}

func insertVerb(flags *flag.FlagSet) func(context.Context, *base) error {
	many := flags.Bool("many", false, "all lines in one InsertMany")
	fast := flags.Bool("fast", false, "all lines in one InsertManyFast")
	return func(ctx context.Context, base *base) error {
		if *many || *fast {
			return insertTogether(ctx, base, *fast)
		}
		return insertEach(ctx, base)
	}
}

// insertEach answers each line before it reads the next. A failure is one line, and the verb continues.
func insertEach(ctx context.Context, base *base) error {
	client, err := base.inserter()
	if err != nil {
		return err
	}
	return requests(func(params river.InsertManyParams, err error) error {
		var result *rivertype.JobInsertResult
		if err == nil {
			result, err = client.Insert(ctx, params.Args, params.InsertOpts)
		}
		if err != nil {
			return base.out.print(map[string]string{"error": err.Error()})
		}
		return printInserted(base, params.Args, result)
	})
}

func insertTogether(ctx context.Context, base *base, fast bool) error {
	client, err := base.inserter()
	if err != nil {
		return err
	}
	var all []river.InsertManyParams
	err = requests(func(params river.InsertManyParams, err error) error {
		all = append(all, params)
		return err
	})
	if err != nil {
		return err
	}
	if fast {
		count, err := client.InsertManyFast(ctx, all)
		if err != nil {
			return err
		}
		return base.out.print(map[string]int{"count": count})
	}
	results, err := client.InsertMany(ctx, all)
	if err != nil {
		return err
	}
	for i, result := range results {
		if err := printInserted(base, all[i].Args, result); err != nil {
			return err
		}
	}
	return nil
}

func printInserted(base *base, args river.JobArgs, result *rivertype.JobInsertResult) error {
	encoded, err := json.Marshal(args)
	if err != nil {
		return err
	}
	return base.out.print(inserted{
		row: rowOf(result.Job), EncodedArgs: string(encoded), Skipped: result.UniqueSkippedAsDuplicate,
	})
}
