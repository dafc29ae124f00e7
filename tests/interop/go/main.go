// Command interop runs River in Go for the tests of a mixed fleet and the benchmarks.
//
// Each verb takes --database-url and --schema, prints JSON lines on standard output, and prints
// its error on standard error, with exit code 1.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
)

// A verb declares its flags and returns the function that runs after they are parsed.
type verb func(flags *flag.FlagSet) func(ctx context.Context, base *base) error

var verbs = map[string]verb{
	"bench":          benchVerb,
	"cancel":         jobVerb(cancelJob),
	"cron":           cronVerb,
	"delete":         jobVerb(deleteJob),
	"extensions":     extensionsVerb,
	"insert":         insertVerb,
	"job-output":     jobVerb(setOutput),
	"list":           listVerb,
	"migrate":        migrateVerb,
	"pause":          queueVerb(pauseQueue),
	"queue-metadata": queueVerb(setQueueMetadata),
	"queues":         queuesVerb,
	"resign":         resignVerb,
	"resume":         queueVerb(resumeQueue),
	"retry":          jobVerb(retryJob),
	"session":        sessionVerb,
	"work":           workVerb,
}

// base has the flags of all verbs.
type base struct {
	args   []string
	out    *output
	pool   *pgxpool.Pool
	schema string
}

// inserter returns a client that works no jobs. River notifies of a queue once per FetchCooldown,
// and suppresses all other notifications. The shortest one lets a test rely on each of its inserts.
func (b *base) inserter() (*river.Client[pgx.Tx], error) {
	return b.client(&river.Config{FetchCooldown: river.FetchCooldownMin})
}

func (b *base) client(config *river.Config) (*river.Client[pgx.Tx], error) {
	config.Schema = b.schema
	config.SkipUnknownJobCheck = true
	config.SkipJobKindValidation = true
	if config.Logger == nil {
		config.Logger = slog.New(
			slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	return river.NewClient(riverpgxv5.New(b.pool), config)
}

// output writes JSON lines; any goroutine may use it.
type output struct {
	mutex   sync.Mutex
	encoder *json.Encoder
}

func (o *output) print(value any) error {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return o.encoder.Encode(value)
}

func run(ctx context.Context, name string, args []string) error {
	verb, ok := verbs[name]
	if !ok {
		return fmt.Errorf("no such verb: %q", name)
	}
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	url := flags.String("database-url", os.Getenv("DATABASE_URL"), "URL of the database")
	schema := flags.String("schema", "", "schema of River's tables (default: the search path)")
	connections := flags.Int("connections", 0, "most connections of the pool (0: pgx decides)")
	do := verb(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *url == "" {
		return errors.New("give --database-url or set DATABASE_URL")
	}
	config, err := pgxpool.ParseConfig(*url)
	if err != nil {
		return err
	}
	if *connections > 0 {
		config.MaxConns = int32(*connections)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	encoder := json.NewEncoder(os.Stdout)
	return do(ctx, &base{
		args: flags.Args(), out: &output{encoder: encoder}, pool: pool, schema: *schema,
	})
}

// usage makes -h print this text after the flags.
func usage(flags *flag.FlagSet, text string) {
	flags.Usage = func() {
		fmt.Fprintf(flags.Output(), "Usage of %s:\n", flags.Name())
		flags.PrintDefaults()
		fmt.Fprintf(flags.Output(), "\n%s\n", text)
	}
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: interop VERB [FLAGS] [ARGUMENTS]")
		os.Exit(1)
	}
	if err := run(context.Background(), os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
