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
}

type requestOpts struct {
	MaxAttempts int             `json:"max_attempts"`
	Metadata    json.RawMessage `json:"metadata"`
	Pending     bool            `json:"pending"`
	Priority    int             `json:"priority"`
	Queue       string          `json:"queue"`
	ScheduledAt time.Time       `json:"scheduled_at"`
	Tags        []string        `json:"tags"`
	Unique      struct {
		ByArgs      bool                 `json:"by_args"`
		ByPeriod    float64              `json:"by_period_s"`
		ByQueue     bool                 `json:"by_queue"`
		ByState     []rivertype.JobState `json:"by_state"`
		ExcludeKind bool                 `json:"exclude_kind"`
	} `json:"unique"`
}

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
	return river.InsertManyParams{Args: args, InsertOpts: &river.InsertOpts{
		MaxAttempts: r.Opts.MaxAttempts,
		Metadata:    r.Opts.Metadata,
		Pending:     r.Opts.Pending,
		Priority:    r.Opts.Priority,
		Queue:       r.Opts.Queue,
		ScheduledAt: r.Opts.ScheduledAt,
		Tags:        r.Opts.Tags,
		UniqueOpts: river.UniqueOpts{
			ByArgs:      r.Opts.Unique.ByArgs,
			ByPeriod:    time.Duration(r.Opts.Unique.ByPeriod * float64(time.Second)),
			ByQueue:     r.Opts.Unique.ByQueue,
			ByState:     r.Opts.Unique.ByState,
			ExcludeKind: r.Opts.Unique.ExcludeKind,
		},
	}}, nil
}

// requests calls `each` for every object of standard input as it comes.
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

// insertEach answers each line before it reads the next. A failure is one line, and no end.
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
