-- The statements of `riverpy demo`: a schema for each run, and the checks of its jobs.


-- name: demo_lock
-- Lock the schema of a run until the connection ends. A later run may drop a schema without a lock.
select pg_try_advisory_lock(hashtext('riverpy demo'), hashtext(@schema::text));


-- name: demo_ended
-- The schemas of ended runs, each with the statement that drops it. They are locked from now on.
with found as materialized (
  select nspname::text as name
  from pg_catalog.pg_namespace
  where nspname ~ '^riverpy_demo_[0-9a-f]{8}$' and pg_has_role(nspowner, 'usage')
)
select format('drop schema if exists %I cascade', name) as command
from found
where pg_try_advisory_lock(hashtext('riverpy demo'), hashtext(name));


-- name: demo_create_schema
-- The statement that creates the schema if it is missing.
select format('create schema if not exists %I', @schema::text) as command
where not exists (select from pg_catalog.pg_namespace where nspname = @schema::text);


-- name: demo_count
-- The number of all jobs, of unfinished jobs and of running jobs.
select
  count(*), count(*) filter (where finalized_at is null), count(*) filter (where state = 'running')
from /* schema */ river_job;


-- name: demo_summary
-- The jobs of each kind and state. Times are seconds of the last attempt. Quantiles are p50 and p95.
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
-- The jobs that could not read their file, with the error.
select id, (args ->> 'path') || ': ' || substr(errors[1] ->> 'error', length('JobCancelError: ') + 1) as reason
from /* schema */ river_job
where kind = 'compress_file' and state = 'cancelled' and errors[1] ->> 'error' like 'JobCancelError: cannot read %'
order by id;


-- name: demo_unintended
-- The jobs that did not end as expected, should not exist, or are missing.
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
-- Jobs that exist more than once. No two jobs of a run have the same kind and args.
select kind, args::text, count(*) as jobs
from /* schema */ river_job
group by kind, args
having count(*) > 1
order by kind, args;


-- name: demo_without_output
-- Completed jobs of files without a digest.
select id
from /* schema */ river_job
where kind = 'compress_file' and state = 'completed'
  and coalesce(metadata #>> '{output,sha256}', '') !~ '^[0-9a-f]{64}$'
order by id;


-- name: demo_sample
-- Some completed jobs whose files are small, in an order that is the same in each run.
select id, args ->> 'path' as path
from /* schema */ river_job
where kind = 'compress_file' and state = 'completed'
  and (metadata #>> '{output,bytes_in}')::bigint <= @size_max::bigint
order by md5(id::text)
limit @limit::bigint;


-- name: demo_wrong_digests
-- Jobs whose digest is not the one that the server computes from the content.
select job.id, job.args ->> 'path' as path
from unnest(@id::bigint[], @content::bytea[]) as sample (id, content)
join /* schema */ river_job as job on job.id = sample.id
where job.metadata #>> '{output,sha256}' is distinct from encode(sha256(sample.content), 'hex')
order by job.id;
