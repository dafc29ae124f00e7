-- What `riverpy demo` does beside inserting and working: a schema for each run, and the checks of what became of it.


-- name: demo_lock
-- Hold the name of a run's schema until the connection ends: what nobody holds, a later run may drop.
select pg_try_advisory_lock(hashtext('riverpy demo'), hashtext(@schema::text));


-- name: demo_ended
-- Schemas of runs that have ended, each with the statement that drops it; they are locked from now on.
with found as materialized (
  select nspname::text as name
  from pg_catalog.pg_namespace
  where nspname ~ '^riverpy_demo_[0-9a-f]{8}$' and pg_has_role(nspowner, 'usage')
)
select format('drop schema if exists %I cascade', name) as command
from found
where pg_try_advisory_lock(hashtext('riverpy demo'), hashtext(name));


-- name: demo_create_schema
-- The statement that makes the schema, if it is not there.
select format('create schema if not exists %I', @schema::text) as command
where not exists (select from pg_catalog.pg_namespace where nspname = @schema::text);


-- name: demo_count
-- How many jobs there are, how many of them have not ended, and how many run.
select
  count(*), count(*) filter (where finalized_at is null), count(*) filter (where state = 'running')
from /* schema */ river_job;


-- name: demo_summary
-- What happened to the jobs of each kind. Times are seconds of the last attempt; quantiles are p50 and p95.
select
  kind,
  state::text,
  count(*) as jobs,
  sum(attempt)::bigint as attempts,
  (
    count(*)
    / nullif(extract(epoch from /* finite */ (max(finalized_at)) - /* finite */ (min(attempted_at))), 0)
  )::float8 as rate,
  percentile_cont(array[0.5, 0.95]) within group (
    order by greatest(extract(epoch from /* finite */ (attempted_at) - /* finite */ (scheduled_at)), 0)::float8
  ) as wait,
  percentile_cont(array[0.5, 0.95]) within group (
    order by greatest(extract(epoch from /* finite */ (finalized_at) - /* finite */ (attempted_at)), 0)::float8
  ) as run,
  sum((metadata #>> '{output,bytes_in}')::bigint)::bigint as bytes_in,
  sum((metadata #>> '{output,bytes_out}')::bigint)::bigint as bytes_out
from /* schema */ river_job
group by kind, state
order by jobs desc, kind, state;


-- name: demo_unreadable
-- Jobs that gave up on a file, and why.
select id, (args ->> 'path') || ': ' || substr(errors[1] ->> 'error', length('JobCancelError: ') + 1) as reason
from /* schema */ river_job
where kind = 'compress_file' and state = 'cancelled' and errors[1] ->> 'error' like 'JobCancelError: cannot read %'
order by id;


-- name: demo_unintended
-- Jobs that stand otherwise than they should, or should not exist, or are missing.
select
  coalesce(wanted.id, job.id) as id, job.kind, wanted.state as wanted, job.state::text as found, job.attempt,
  coalesce(cardinality(job.errors), 0) as errors, job.errors[cardinality(job.errors)] ->> 'error' as last_error
from unnest(@id::bigint[], @state::text[], @attempt::int[], @errors::int[], @snoozes::int[])
  as wanted (id, state, attempt, errors, snoozes)
full join /* schema */ river_job as job on job.id = wanted.id
where job.id is null or wanted.id is null
  or job.state::text <> wanted.state
  or job.attempt <> wanted.attempt
  or coalesce(cardinality(job.errors), 0) <> wanted.errors
  or coalesce((job.metadata ->> 'snoozes')::int, 0) <> wanted.snoozes
order by 1;


-- name: demo_duplicates
-- Jobs that exist more than once: no two of a run have the same kind and args.
select kind, args::text, count(*) as jobs
from /* schema */ river_job
group by kind, args
having count(*) > 1
order by kind, args;


-- name: demo_without_output
-- Files that count as done and have no digest.
select id
from /* schema */ river_job
where kind = 'compress_file' and state = 'completed'
  and coalesce(metadata #>> '{output,sha256}', '') !~ '^[0-9a-f]{64}$'
order by id;


-- name: demo_sample
-- Some of the files that are done and not too large, chosen so that each run chooses the same.
select id, args ->> 'path' as path
from /* schema */ river_job
where kind = 'compress_file' and state = 'completed'
  and (metadata #>> '{output,bytes_in}')::bigint <= @size_max::bigint
order by md5(id::text)
limit @limit::bigint;


-- name: demo_wrong_digests
-- Jobs whose digest is not that of the content, as the server computes it.
select job.id, job.args ->> 'path' as path
from unnest(@id::bigint[], @content::bytea[]) as sample (id, content)
join /* schema */ river_job as job on job.id = sample.id
where job.metadata #>> '{output,sha256}' is distinct from encode(sha256(sample.content), 'hex')
order by job.id;
