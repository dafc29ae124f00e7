package main

import (
	"context"
	"errors"
	"flag"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

const pageSize = 1_000

type client = river.Client[pgx.Tx]

// jobVerb is a verb whose first argument is a job's id; it prints the job's row.
func jobVerb(
	do func(context.Context, *client, int64, []string) (*rivertype.JobRow, error),
) verb {
	return func(*flag.FlagSet) func(context.Context, *base) error {
		return func(ctx context.Context, base *base) error {
			if len(base.args) == 0 {
				return errors.New("give the id of a job")
			}
			id, err := strconv.ParseInt(base.args[0], 10, 64)
			if err != nil {
				return err
			}
			client, err := base.inserter()
			if err != nil {
				return err
			}
			job, err := do(ctx, client, id, base.args[1:])
			if err != nil {
				return err
			}
			return base.out.print(rowOf(job))
		}
	}
}

func cancelJob(ctx context.Context, c *client, id int64, _ []string) (*rivertype.JobRow, error) {
	return c.JobCancel(ctx, id)
}

func deleteJob(ctx context.Context, c *client, id int64, _ []string) (*rivertype.JobRow, error) {
	return c.JobDelete(ctx, id)
}

func retryJob(ctx context.Context, c *client, id int64, _ []string) (*rivertype.JobRow, error) {
	return c.JobRetry(ctx, id)
}

func setOutput(ctx context.Context, c *client, id int64, rest []string) (*rivertype.JobRow, error) {
	if len(rest) != 1 {
		return nil, errors.New("give the output as JSON")
	}
	return c.JobUpdate(ctx, id, &river.JobUpdateParams{Output: jsonText(rest[0])})
}

// jsonText is JSON that is passed on unchanged.
type jsonText string

func (t jsonText) MarshalJSON() ([]byte, error) { return []byte(t), nil }

// queueVerb is a verb whose first argument is a queue's name (or "*").
func queueVerb(do func(context.Context, *client, string, []string) error) verb {
	return func(*flag.FlagSet) func(context.Context, *base) error {
		return func(ctx context.Context, base *base) error {
			if len(base.args) == 0 {
				return errors.New("give the name of a queue")
			}
			client, err := base.inserter()
			if err != nil {
				return err
			}
			return do(ctx, client, base.args[0], base.args[1:])
		}
	}
}

func pauseQueue(ctx context.Context, c *client, name string, _ []string) error {
	return c.QueuePause(ctx, name, nil)
}

func resumeQueue(ctx context.Context, c *client, name string, _ []string) error {
	return c.QueueResume(ctx, name, nil)
}

func setQueueMetadata(ctx context.Context, c *client, name string, rest []string) error {
	if len(rest) != 1 {
		return errors.New("give the metadata as JSON")
	}
	_, err := c.QueueUpdate(ctx, name, &river.QueueUpdateParams{Metadata: []byte(rest[0])})
	return err
}

func resignVerb(*flag.FlagSet) func(context.Context, *base) error {
	return func(ctx context.Context, base *base) error {
		client, err := base.inserter()
		if err != nil {
			return err
		}
		return client.Notify().RequestResign(ctx)
	}
}

// listVerb prints every job, in every state, in the order of their ids.
func listVerb(*flag.FlagSet) func(context.Context, *base) error {
	return func(ctx context.Context, base *base) error {
		client, err := base.inserter()
		if err != nil {
			return err
		}
		params := river.NewJobListParams().First(pageSize)
		for {
			page, err := client.JobList(ctx, params)
			if err != nil {
				return err
			}
			for _, job := range page.Jobs {
				if err := base.out.print(rowOf(job)); err != nil {
					return err
				}
			}
			if len(page.Jobs) < pageSize {
				return nil
			}
			params = params.After(page.LastCursor)
		}
	}
}

func queuesVerb(*flag.FlagSet) func(context.Context, *base) error {
	return func(ctx context.Context, base *base) error {
		client, err := base.inserter()
		if err != nil {
			return err
		}
		result, err := client.QueueList(ctx, river.NewQueueListParams().First(pageSize))
		if err != nil {
			return err
		}
		for _, queue := range result.Queues {
			if err := base.out.print(queueOf(queue)); err != nil {
				return err
			}
		}
		return nil
	}
}

// queueOf is a queue under the names of the columns; the metadata are text.
func queueOf(queue *rivertype.Queue) map[string]any {
	return map[string]any{
		"name":       queue.Name,
		"created_at": queue.CreatedAt,
		"metadata":   string(queue.Metadata),
		"paused_at":  queue.PausedAt,
		"updated_at": queue.UpdatedAt,
	}
}
