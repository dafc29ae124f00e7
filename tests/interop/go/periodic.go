package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/riverqueue/river"
	"github.com/robfig/cron/v3"
)

// periodicJob is one element of the flag --periodic-jobs.
type periodicJob struct {
	Cron       string     `json:"cron"` // the schedule: either this or EveryMs
	EveryMs    int        `json:"every_ms"`
	ID         string     `json:"id"`
	Kind       string     `json:"kind"`
	Queue      string     `json:"queue"`
	RunOnStart bool       `json:"run_on_start"`
	Unique     uniqueOpts `json:"unique"`
}

func (p periodicJob) build() (*river.PeriodicJob, error) {
	schedule := river.PeriodicInterval(milliseconds(p.EveryMs))
	if p.Cron != "" {
		var err error
		if schedule, err = parseCron(p.Cron); err != nil {
			return nil, err
		}
	}
	construct := func() (river.JobArgs, *river.InsertOpts) {
		return rawArgs{kind: p.Kind, text: []byte(`{"by":"go"}`)}, &river.InsertOpts{
			Queue: p.Queue, UniqueOpts: p.Unique.opts(),
		}
	}
	opts := &river.PeriodicJobOpts{ID: p.ID, RunOnStart: p.RunOnStart}
	return river.NewPeriodicJob(schedule, construct, opts), nil
}

func milliseconds(n int) time.Duration { return time.Duration(n) * time.Millisecond }

// addPeriodicJobs adds the periodic jobs of the flag --periodic-jobs.
func addPeriodicJobs(config *river.Config, text string) error {
	var described []periodicJob
	if err := json.Unmarshal([]byte(text), &described); err != nil {
		return err
	}
	for _, one := range described {
		job, err := one.build()
		if err != nil {
			return err
		}
		config.PeriodicJobs = append(config.PeriodicJobs, job)
	}
	return nil
}

// parseCron calls ParseStandard, and turns its panics into errors.
func parseCron(text string) (schedule cron.Schedule, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("panic: %v", cause)
		}
	}()
	return cron.ParseStandard(text)
}

// cronLine is a line of tests/vectors/cron.jsonl.
type cronLine struct {
	Expression string      `json:"expression"`
	Zone       string      `json:"zone"`
	After      time.Time   `json:"after"`
	Count      int         `json:"count"`
	Next       []time.Time `json:"next"`
}

// cronVerb reads such lines and prints them with the next times, in UTC, that robfig/cron finds
// after a time in the zone: null for a text that it refuses, fewer than asked for if no more come.
// `interop cron --database-url - < cron.jsonl` makes the vectors again.
func cronVerb(*flag.FlagSet) func(context.Context, *base) error {
	return func(_ context.Context, base *base) error {
		base.out.encoder.SetEscapeHTML(false)
		for lines := json.NewDecoder(os.Stdin); ; {
			var line cronLine
			if err := lines.Decode(&line); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
			zone, err := time.LoadLocation(line.Zone)
			if err != nil {
				return err
			}
			line.Next = nextTimes(line.Expression, line.After.In(zone), line.Count)
			if err := base.out.print(line); err != nil {
				return err
			}
		}
	}
}

func nextTimes(text string, after time.Time, count int) []time.Time {
	schedule, err := parseCron(text)
	if err != nil {
		return nil
	}
	found := []time.Time{}
	for at := after; len(found) < count; {
		if at = schedule.Next(at); at.IsZero() {
			break
		}
		found = append(found, at.UTC())
	}
	return found
}
