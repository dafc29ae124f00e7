package main

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/riverqueue/river"
)

// stub registers a kind that another language works: a leader that knows the kind
// does not discard its jobs, and without a timeout leaves them alone.
type stub struct {
	river.WorkerDefaults[task]
}

func (stub) Work(context.Context, *river.Job[task]) error {
	return errors.New("worked in another language")
}

func (stub) Timeout(*river.Job[task]) time.Duration { return -1 }

func addStubs(workers *river.Workers, kinds string) {
	if kinds == "" {
		return
	}
	for _, kind := range strings.Split(kinds, ",") {
		river.AddWorkerArgs(workers, task{kind: kind}, &stub{})
	}
}
