-- The statements of the measurements, by name. They are one statement each.

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
-- $1: how many.
insert into river_job (args, kind, max_attempts)
select '{}', 'noop', 25 from generate_series(1, $1::int)

-- name: fill_completed
-- $1: how many, of the last twelve hours.
insert into river_job (
  args, kind, max_attempts, state, attempt, attempted_by, created_at, scheduled_at, attempted_at, finalized_at
)
select '{}', 'noop', 25, 'completed', 1, '{bench}', t.at, t.at, t.at, t.at
from generate_series(1, $1::int) as i, lateral (select now() - interval '12 hours' * i / $1::int as at) as t

-- name: now
select clock_timestamp()

-- name: progress
-- $1: since when. How many were finished, from first claim to last end in seconds.
select
  count(*) as jobs,
  coalesce(extract(epoch from max(finalized_at) - min(attempted_at)), 0)::float8 as seconds
from river_job
where state = 'completed' and finalized_at >= $1

-- name: repeated
-- $1: since when. Jobs that were claimed more than once.
select count(*)
from river_job
where state = 'completed' and finalized_at >= $1 and (attempt <> 1 or cardinality(attempted_by) <> 1)

-- name: waiting
select count(*) from river_job where state = 'available'

-- name: waits
-- $1: since when. From due to claimed, in milliseconds.
select
  percentile_cont(0.5) within group (order by wait)::float8 as p50,
  percentile_cont(0.99) within group (order by wait)::float8 as p99
from (
  select extract(epoch from attempted_at - scheduled_at) * 1000 as wait
  from river_job
  where state = 'completed' and finalized_at >= $1
) as waits

-- name: rate_between
-- $1, $2: from, to. Jobs finished a second.
select count(*) / extract(epoch from $2::timestamptz - $1::timestamptz)::float8
from river_job
where state = 'completed' and finalized_at >= $1 and finalized_at < $2

-- name: statements_extension
create extension if not exists pg_stat_statements

-- name: statements_reset
select pg_stat_statements_reset()

-- name: statements_count
-- What this database's clients sent, but for the measurement's own.
select coalesce(sum(calls), 0)::int
from pg_stat_statements
where
  dbid = (select oid from pg_database where datname = current_database())
  and query not like '%pg_stat_statements%'

-- name: claim_cost
-- Of the statement that claims: rows, and milliseconds in the server for a call and microseconds for a row.
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
-- Those of all runs, with the process that made them.
select datname as name, split_part(datname, '_', 2) as pid
from pg_database
where datname ~ '^bench_[0-9]+_'

-- name: spread
-- $1: over how many queues the waiting jobs are to be spread.
update river_job set queue = 'q' || id % $1::int where state = 'available'
