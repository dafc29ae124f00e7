package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/riverqueue/river"
)

// queueChange is a line on standard input of the verb work that changes the queues of its client.
// The answer is the event "queue_changed" with the queue and the type of the error, or "".
type queueChange struct {
	Do        string `json:"do"` // add or remove
	Queue     string `json:"queue"`
	Slots     int    `json:"slots"`
	TimeoutMs int    `json:"timeout_ms"`
}

// queueChanges are the changes that were read from standard input.
var queueChanges = make(chan queueChange, 16)

func changeQueues(ctx context.Context, client *client, out *output) {
	for change := range queueChanges {
		err := changeQueue(ctx, client, change)
		kind := ""
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			kind = "timeout"
		case err != nil:
			kind = fmt.Sprintf("%T", err)
		}
		_ = out.print(map[string]any{"event": "queue_changed", "queue": change.Queue, "error": kind})
	}
}

func changeQueue(ctx context.Context, client *client, change queueChange) error {
	// Older versions of River cannot remove queues.
	queues, ok := any(client.Queues()).(interface {
		Remove(context.Context, string) error
	})
	if change.Do == "add" {
		return client.Queues().Add(change.Queue, river.QueueConfig{MaxWorkers: change.Slots})
	}
	if !ok {
		return errors.New("this version of River cannot remove queues")
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(change.TimeoutMs)*time.Millisecond)
	defer cancel()
	return queues.Remove(ctx, change.Queue)
}
