package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

const sessionHelp = `Reads commands, one JSON object a line, and answers each with one line before it
reads the next: {"result": …}, or {"error": TEXT, "kind": "not_found" | "running" | "other"}.

  {"do": "begin"}, {"do": "commit"}, {"do": "rollback"}
      One transaction at a time; the commands between run in it. Without one each commits alone.
  {"do": "fail"}                   run a statement that fails, in the transaction
  {"do": "insert", "requests": [R]}        R as the verb insert reads them; the row
  {"do": "insert_many", "requests": […]}   the rows
  {"do": "insert_many_fast", "requests": […]}   the count
  {"do": "get" | "cancel" | "retry" | "delete", "id": N}   the row
  {"do": "list", "params": P}      {"jobs": [rows], "cursor": TEXT or null}
  {"do": "delete_many", "params": P}       the rows
      P: {"ids", "kinds", "queues", "priorities", "states", "tags_all", "tags_any": lists,
      "metadata": TEXT, "order": FIELD, "descending": BOOL, "limit": N, "after": CURSOR,
      "unsafe_all": BOOL}
  {"do": "output", "id": N, "value": JSON}   set the job's output; the row
  {"do": "queue_get", "queue": NAME}, {"do": "queue_list"}
  {"do": "queue_update", "queue": NAME, "value": JSON}   set its metadata; the queue
  {"do": "pause" | "resume", "queue": NAME}
  {"do": "request_resign"}         ask the leader to resign`

// command is one line of a session's input.
type command struct {
	Do       string          `json:"do"`
	ID       int64           `json:"id"`
	Queue    string          `json:"queue"`
	Value    json.RawMessage `json:"value"`
	Requests []request       `json:"requests"`
	Params   listParams      `json:"params"`
}

// session executes commands, in a transaction while one is open.
type session struct {
	base   *base
	client *client
	tx     pgx.Tx
}

func sessionVerb(flags *flag.FlagSet) func(context.Context, *base) error {
	usage(flags, sessionHelp)
	return func(ctx context.Context, base *base) error {
		client, err := base.inserter()
		if err != nil {
			return err
		}
		session := &session{base: base, client: client}
		lines := bufio.NewScanner(os.Stdin)
		lines.Buffer(nil, 1<<26)
		for lines.Scan() {
			var read command
			if err := json.Unmarshal(lines.Bytes(), &read); err != nil {
				return err
			}
			if err := session.answer(ctx, &read); err != nil {
				return err
			}
		}
		return lines.Err()
	}
}

func (s *session) answer(ctx context.Context, c *command) error {
	result, err := s.do(ctx, c)
	if err == nil {
		return s.base.out.print(map[string]any{"result": result})
	}
	kind := "other"
	switch {
	case errors.Is(err, rivertype.ErrNotFound):
		kind = "not_found"
	case errors.Is(err, rivertype.ErrJobRunning):
		kind = "running"
	}
	return s.base.out.print(map[string]any{"error": err.Error(), "kind": kind})
}

func (s *session) do(ctx context.Context, c *command) (any, error) {
	switch c.Do {
	case "begin", "commit", "rollback", "fail":
		return nil, s.transact(ctx, c.Do)
	case "insert", "insert_many", "insert_many_fast":
		return s.insert(ctx, c)
	case "get", "cancel", "retry", "delete", "output":
		job, err := s.job(ctx, c)
		if err != nil {
			return nil, err
		}
		return rowOf(job), nil
	case "list":
		return s.list(ctx, &c.Params)
	case "delete_many":
		return s.deleteMany(ctx, &c.Params)
	case "request_resign":
		if s.tx != nil {
			return nil, s.client.Notify().RequestResignTx(ctx, s.tx)
		}
		return nil, s.client.Notify().RequestResign(ctx)
	}
	return s.queue(ctx, c)
}

func (s *session) transact(ctx context.Context, how string) (err error) {
	if how == "begin" {
		s.tx, err = s.base.pool.Begin(ctx)
		return err
	}
	if s.tx == nil {
		return errors.New("there is no transaction")
	}
	switch how {
	case "fail":
		_, err = s.tx.Exec(ctx, "SELECT 1/0")
		return err
	case "commit":
		err = s.tx.Commit(ctx)
	default:
		err = s.tx.Rollback(ctx)
	}
	s.tx = nil
	return err
}

func (s *session) insert(ctx context.Context, c *command) (any, error) {
	var all []river.InsertManyParams
	for _, one := range c.Requests {
		params, err := one.params()
		if err != nil {
			return nil, err
		}
		all = append(all, params)
	}
	switch c.Do {
	case "insert":
		return s.insertOne(ctx, all[0])
	case "insert_many_fast":
		if s.tx != nil {
			return s.client.InsertManyFastTx(ctx, s.tx, all)
		}
		return s.client.InsertManyFast(ctx, all)
	}
	var results []*rivertype.JobInsertResult
	var err error
	if s.tx != nil {
		results, err = s.client.InsertManyTx(ctx, s.tx, all)
	} else {
		results, err = s.client.InsertMany(ctx, all)
	}
	rows := make([]inserted, len(results))
	for i, result := range results {
		rows[i] = insertedOf(result)
	}
	return rows, err
}

func (s *session) insertOne(ctx context.Context, one river.InsertManyParams) (any, error) {
	var result *rivertype.JobInsertResult
	var err error
	if s.tx != nil {
		result, err = s.client.InsertTx(ctx, s.tx, one.Args, one.InsertOpts)
	} else {
		result, err = s.client.Insert(ctx, one.Args, one.InsertOpts)
	}
	if err != nil {
		return nil, err
	}
	return insertedOf(result), nil
}

func insertedOf(result *rivertype.JobInsertResult) inserted {
	return inserted{row: rowOf(result.Job), Skipped: result.UniqueSkippedAsDuplicate}
}

func (s *session) job(ctx context.Context, c *command) (*rivertype.JobRow, error) {
	update := &river.JobUpdateParams{Output: jsonText(c.Value)}
	if s.tx != nil {
		switch c.Do {
		case "get":
			return s.client.JobGetTx(ctx, s.tx, c.ID)
		case "cancel":
			return s.client.JobCancelTx(ctx, s.tx, c.ID)
		case "retry":
			return s.client.JobRetryTx(ctx, s.tx, c.ID)
		case "delete":
			return s.client.JobDeleteTx(ctx, s.tx, c.ID)
		}
		return s.client.JobUpdateTx(ctx, s.tx, c.ID, update)
	}
	switch c.Do {
	case "get":
		return s.client.JobGet(ctx, c.ID)
	case "cancel":
		return s.client.JobCancel(ctx, c.ID)
	case "retry":
		return s.client.JobRetry(ctx, c.ID)
	case "delete":
		return s.client.JobDelete(ctx, c.ID)
	}
	return s.client.JobUpdate(ctx, c.ID, update)
}

func (s *session) queue(ctx context.Context, c *command) (any, error) {
	switch c.Do {
	case "queue_list":
		return s.queues(ctx)
	case "pause":
		if s.tx != nil {
			return nil, s.client.QueuePauseTx(ctx, s.tx, c.Queue, nil)
		}
		return nil, s.client.QueuePause(ctx, c.Queue, nil)
	case "resume":
		if s.tx != nil {
			return nil, s.client.QueueResumeTx(ctx, s.tx, c.Queue, nil)
		}
		return nil, s.client.QueueResume(ctx, c.Queue, nil)
	case "queue_get", "queue_update":
		queue, err := s.oneQueue(ctx, c)
		if err != nil {
			return nil, err
		}
		return queueOf(queue), nil
	}
	return nil, fmt.Errorf("no such command: %q", c.Do)
}

func (s *session) oneQueue(ctx context.Context, c *command) (*rivertype.Queue, error) {
	update := &river.QueueUpdateParams{Metadata: c.Value}
	switch {
	case c.Do == "queue_get" && s.tx != nil:
		return s.client.QueueGetTx(ctx, s.tx, c.Queue)
	case c.Do == "queue_get":
		return s.client.QueueGet(ctx, c.Queue)
	case s.tx != nil:
		return s.client.QueueUpdateTx(ctx, s.tx, c.Queue, update)
	}
	return s.client.QueueUpdate(ctx, c.Queue, update)
}

func (s *session) queues(ctx context.Context) (any, error) {
	params := river.NewQueueListParams().First(pageSize)
	var page *river.QueueListResult
	var err error
	if s.tx != nil {
		page, err = s.client.QueueListTx(ctx, s.tx, params)
	} else {
		page, err = s.client.QueueList(ctx, params)
	}
	if err != nil {
		return nil, err
	}
	queues := make([]map[string]any, len(page.Queues))
	for i, queue := range page.Queues {
		queues[i] = queueOf(queue)
	}
	return queues, nil
}
