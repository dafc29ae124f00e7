-- Statements of the measurements by name, one statement each.

-- name: version
select current_setting('server_version')

-- name: database
select current_database()

-- name: empty
truncate river_job

-- name: settle
vacuum (analyze)

-- name: checkpoint
checkpoint

-- name: fill_available
-- $1: number of jobs.
insert into river_job (args, kind, max_attempts)
select '{}', 'noop', 25 from generate_series(1, $1::int)

-- name: fill_completed
-- $1: number of jobs, finished within the last twelve hours.
insert into river_job (
  args, kind, max_attempts, state, attempt, attempted_by, created_at, scheduled_at, attempted_at, finalized_at
)
select '{}', 'noop', 25, 'completed', 1, '{bench}', t.at, t.at, t.at, t.at
from generate_series(1, $1::int) as i, lateral (select now() - interval '12 hours' * i / $1::int as at) as t

-- name: now
select clock_timestamp()

-- name: progress
-- $1: start. The number of finished jobs, and the seconds from the first claim to the last finish.
select
  count(*) as jobs,
  coalesce(extract(epoch from max(finalized_at) - min(attempted_at)), 0)::float8 as seconds
from river_job
where state = 'completed' and finalized_at >= $1

-- name: repeated
-- $1: start. The jobs that were claimed more than once.
select count(*)
from river_job
where state = 'completed' and finalized_at >= $1 and (attempt <> 1 or cardinality(attempted_by) <> 1)

-- name: waiting
select count(*) from river_job where state = 'available'

-- name: waits
-- $1: start. The time from due to claimed, in milliseconds.
select
  percentile_cont(0.5) within group (order by wait)::float8 as p50,
  percentile_cont(0.99) within group (order by wait)::float8 as p99
from (
  select extract(epoch from attempted_at - scheduled_at) * 1000 as wait
  from river_job
  where state = 'completed' and finalized_at >= $1
) as waits

-- name: rate_between
-- $1, $2: start and end. Finished jobs per second.
select count(*) / extract(epoch from $2::timestamptz - $1::timestamptz)::float8
from river_job
where state = 'completed' and finalized_at >= $1 and finalized_at < $2

-- name: statements_extension
create extension if not exists pg_stat_statements

-- name: statements_reset
select pg_stat_statements_reset()

-- name: statements_count
-- The number of statements in this database, without those of the measurement.
select coalesce(sum(calls), 0)::int
from pg_stat_statements
where
  dbid = (select oid from pg_database where datname = current_database())
  and query not like '%pg_stat_statements%'

-- name: claim_cost
-- The claim statement: rows, milliseconds in the server per call, and microseconds per row.
select
  rows::int as rows,
  mean_exec_time as ms_per_call,
  total_exec_time * 1000 / nullif(rows, 0) as us_per_job
from pg_stat_statements
where
  dbid = (select oid from pg_database where datname = current_database())
  and query ilike '%skip locked%'
order by rows desc
limit 1

-- name: table_count
select count(*) from pg_tables where schemaname = 'public'

-- name: databases
-- The databases of all runs, with the process that created them.
select datname as name, split_part(datname, '_', 2) as pid
from pg_database
where datname ~ '^bench_[0-9]+_'

-- name: spread
-- $1: the number of queues for the waiting jobs, $2: the number of slots. A queue gets jobs in proportion to its slots,
-- so that no queue works alone at the end.
update river_job set queue = 'q' || id % $2::int % $1::int where state = 'available'
