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

// workVerb works queues until SIGTERM or SIGINT. The first one stops softly, the second one cancels.
func workVerb(flags *flag.FlagSet) func(context.Context, *base) error {
	queues := flags.String("queues", "default:10", "NAME:SLOTS[,NAME:SLOTS...]")
	var periodic periodicFlags
	flags.StringVar(&periodic.unique, "periodic", "", "KIND:SECONDS[,KIND:SECONDS...], unique by period")
	flags.StringVar(&periodic.plain, "periodic-plain", "", "the same, not unique")
	flags.BoolVar(&periodic.runOnStart, "run-on-start", true, "of all periodic jobs")
	flags.BoolVar(&periodic.withID, "periodic-ids", false, "the id of each periodic job is its kind")
	flags.StringVar(&periodic.queue, "periodic-queue", "", "the queue of all periodic jobs")
	periodicJobs := flags.String("periodic-jobs", "[]", "JSON, see periodicJob")
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
		"as in River's Config; -1ns keeps for ever")
	flags.DurationVar(&config.CancelledJobRetentionPeriod, "cancelled-retention", 0,
		"as in River's Config; -1ns keeps for ever")
	flags.DurationVar(&config.DiscardedJobRetentionPeriod, "discarded-retention", 0,
		"as in River's Config; -1ns keeps for ever")
	flags.DurationVar(&config.JobCleanerTimeout, "cleaner-timeout", 0, "as in River's Config")
	reindexNames := flags.String("reindex", "", "NAME[,NAME...] of indexes (default: River's)")
	reindexEvery := flags.Duration("reindex-every", 0, "interval (default: midnight)")
	flags.DurationVar(&config.SoftStopTimeout, "soft-stop-timeout", 0, "as in River's Config")
	flags.DurationVar(&config.JobStuckThreshold, "stuck-threshold", 0,
		"as in River's Config; a stuck job is the event job_stuck")
	flags.BoolFunc("known-kinds-only", "as in River's Config", func(text string) error {
		return setIfThere(config, "FetchOnlyKnownKinds", text)
	})
	flags.BoolFunc("no-election", "as in River's Config", func(text string) error {
		return setIfThere(config, "LeaderElectionDisabled", text)
	})
	handler := flags.String("error-handler", "",
		"do this with each failure, which is the event error_handler: nothing, cancel or panic")
	withLog := flags.Bool("job-log", false, "store what jobs log")
	usage(flags, conformHelp)
	flags.BoolVar(&config.TestOnly, "no-stagger", false, "start maintenance without jitter")
	return func(ctx context.Context, base *base) error {
		var err error
		if config.Queues, err = queuesOf(*queues); err != nil {
			return err
		}
		if config.PeriodicJobs, err = periodic.jobs(); err != nil {
			return err
		}
		if *reindexNames != "" {
			config.ReindexerIndexNames = strings.Split(*reindexNames, ",")
		}
		if *reindexEvery > 0 {
			config.ReindexerSchedule = river.PeriodicInterval(*reindexEvery)
		}
		if *handler != "" {
			config.ErrorHandler = &errorHandler{out: base.out, do: *handler}
		}
		if *withLog {
			config.Middleware = append(config.Middleware, jobLog())
		}
		config.JobStuckHandler = reportStuck(base.out)
		if err := addPeriodicJobs(config, *periodicJobs); err != nil {
			return err
		}
		config.Workers = workersOf(base, *retryAfter)
		addConform(config.Workers, base)
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
		&river.SubscribeConfig{ChanSize: 10_000, Kinds: eventKinds()})
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		for event := range events {
			_ = base.out.print(eventLine(event))
		}
	}()
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	if err := client.Start(ctx); err != nil {
		return err
	}
	go changeQueues(ctx, client, base.out)
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
	unsubscribe()
	<-printed
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

// periodicFlags select the periodic jobs of a worker.
type periodicFlags struct {
	unique, plain, queue string
	runOnStart, withID   bool
}

func (p *periodicFlags) jobs() ([]*river.PeriodicJob, error) {
	var jobs []*river.PeriodicJob
	add := func(isUnique bool) func(string, int) {
		return func(kind string, seconds int) {
			jobs = append(jobs, p.job(kind, time.Duration(seconds)*time.Second, isUnique))
		}
	}
	if err := pairs(p.unique, add(true)); err != nil {
		return nil, err
	}
	return jobs, pairs(p.plain, add(false))
}

func (p *periodicFlags) job(kind string, period time.Duration, isUnique bool) *river.PeriodicJob {
	opts := &river.PeriodicJobOpts{RunOnStart: p.runOnStart}
	if p.withID {
		opts.ID = kind
	}
	return river.NewPeriodicJob(
		river.PeriodicInterval(period),
		func() (river.JobArgs, *river.InsertOpts) {
			opts := &river.InsertOpts{Queue: p.queue}
			if isUnique {
				opts.UniqueOpts.ByPeriod = period
			}
			return rawArgs{kind: kind, text: []byte(`{"by":"go"}`)}, opts
		},
		opts,
	)
}
