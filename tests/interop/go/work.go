package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/riverqueue/river"
)

var eventKinds = []river.EventKind{
	river.EventKindJobCancelled,
	river.EventKindJobCompleted,
	river.EventKindJobFailed,
	river.EventKindJobSnoozed,
	river.EventKindQueuePaused,
	river.EventKindQueueResumed,
}

// workVerb works queues until SIGTERM or SIGINT, that stop softly, and a second one, that cancels.
func workVerb(flags *flag.FlagSet) func(context.Context, *base) error {
	queues := flags.String("queues", "default:10", "NAME:SLOTS[,NAME:SLOTS...]")
	periodic := flags.String("periodic", "", "KIND:SECONDS[,KIND:SECONDS...], unique by period")
	stubs := flags.String("stubs", "", "KIND[,KIND...] that others work")
	retryAfter := flags.Duration("retry-after", time.Minute, "pause after a failed attempt")
	config := &river.Config{}
	flags.StringVar(&config.ID, "client-id", "", "id of the client")
	flags.DurationVar(&config.FetchCooldown, "fetch-cooldown", 0, "as in River's Config")
	flags.DurationVar(&config.FetchPollInterval, "fetch-poll-interval", 0, "as in River's Config")
	flags.DurationVar(&config.JobTimeout, "job-timeout", 0, "as in River's Config")
	flags.BoolVar(&config.PollOnly, "poll-only", false, "as in River's Config")
	flags.DurationVar(&config.RescueStuckJobsAfter, "rescue-after", 0, "as in River's Config")
	flags.DurationVar(&config.CompletedJobRetentionPeriod, "completed-retention", 0,
		"as in River's Config")
	flags.DurationVar(&config.SoftStopTimeout, "soft-stop-timeout", 0, "as in River's Config")
	flags.BoolVar(&config.TestOnly, "no-stagger", false, "start maintenance without jitter")
	return func(ctx context.Context, base *base) error {
		var err error
		if config.Queues, err = queuesOf(*queues); err != nil {
			return err
		}
		if config.PeriodicJobs, err = periodicJobsOf(*periodic); err != nil {
			return err
		}
		config.Workers = workersOf(base, *retryAfter)
		addStubs(config.Workers, *stubs)
		return work(ctx, base, config)
	}
}

func work(ctx context.Context, base *base, config *river.Config) error {
	client, err := base.client(config)
	if err != nil {
		return err
	}
	events, unsubscribe := client.SubscribeConfig(
		&river.SubscribeConfig{ChanSize: 10_000, Kinds: eventKinds})
	defer unsubscribe()
	go func() {
		for event := range events {
			_ = base.out.print(eventLine(event))
		}
	}()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	if err := client.Start(ctx); err != nil {
		return err
	}
	if err := base.out.print(map[string]any{"event": "started", "client_id": client.ID()}); err != nil {
		return err
	}
	select {
	case <-signals:
	case <-client.Stopped():
	}
	go func() {
		<-signals
		_ = client.StopAndCancel(ctx)
	}()
	if err := client.Stop(ctx); err != nil {
		return err
	}
	return base.out.print(map[string]any{"event": "stopped"})
}

func eventLine(event *river.Event) map[string]any {
	line := map[string]any{"event": event.Kind}
	if event.Job != nil {
		line["id"] = event.Job.ID
		line["kind"] = event.Job.Kind
		line["state"] = event.Job.State
		line["attempt"] = event.Job.Attempt
	}
	if event.Queue != nil {
		line["queue"] = event.Queue.Name
	}
	return line
}

// pairs calls `each` for every NAME:NUMBER of a list.
func pairs(text string, each func(name string, number int)) error {
	if text == "" {
		return nil
	}
	for _, pair := range strings.Split(text, ",") {
		name, digits, _ := strings.Cut(pair, ":")
		number, err := strconv.Atoi(digits)
		if err != nil {
			return fmt.Errorf("%q is not NAME:NUMBER", pair)
		}
		each(name, number)
	}
	return nil
}

func queuesOf(text string) (map[string]river.QueueConfig, error) {
	queues := map[string]river.QueueConfig{}
	err := pairs(text, func(name string, slots int) {
		queues[name] = river.QueueConfig{MaxWorkers: slots}
	})
	return queues, err
}

func periodicJobsOf(text string) ([]*river.PeriodicJob, error) {
	var jobs []*river.PeriodicJob
	err := pairs(text, func(kind string, seconds int) {
		period := time.Duration(seconds) * time.Second
		jobs = append(jobs, river.NewPeriodicJob(
			river.PeriodicInterval(period),
			func() (river.JobArgs, *river.InsertOpts) {
				return rawArgs{kind: kind, text: []byte(`{"by":"go"}`)},
					&river.InsertOpts{UniqueOpts: river.UniqueOpts{ByPeriod: period}}
			},
			&river.PeriodicJobOpts{RunOnStart: true},
		))
	})
	return jobs, err
}
