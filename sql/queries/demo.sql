-- The statements of `riverpy demo`: a schema for each run, and the checks of its jobs.


-- name: demo_lock
-- Lock the schema of a run until the connection ends. A later run may drop a schema without a lock.
select pg_try_advisory_lock(hashtext('riverpy demo'), hashtext(@name::text));


-- name: demo_drop_ended
-- The schemas of ended runs, each with the statement that drops it. They are locked from now on.
with found as materialized (
  select nspname::text as name
  from pg_catalog.pg_namespace
  where nspname ~ '^riverpy_demo_[0-9a-f]{8}$' and pg_has_role(nspowner, 'usage')
)
select format('drop schema if exists %I cascade', name) as command
from found
where pg_try_advisory_lock(hashtext('riverpy demo'), hashtext(name));


-- name: demo_create
-- The statement that creates the schema.
select format('create schema %I', @name::text) as command;


-- name: demo_count
-- The number of all jobs, of unfinished jobs and of running jobs.
select
  count(*), count(*) filter (where finalized_at is null), count(*) filter (where state = 'running')
from /* schema */ river_job;


-- name: demo_summary
-- The jobs of each kind and state. Times are milliseconds of the last attempt.
with job as (
  select
    kind, state::text, attempt, metadata -> 'output' as output,
    greatest(extract(epoch from /* finite */ (attempted_at) - /* finite */ (scheduled_at)), 0)::float8 * 1000 as wait,
    greatest(extract(epoch from /* finite */ (finalized_at) - /* finite */ (attempted_at)), 0)::float8 * 1000 as run
  from /* schema */ river_job
)
select
  kind, state, count(*) as jobs, sum(attempt)::bigint as attempts,
  round((percentile_cont(0.5) within group (order by wait))::numeric, 1)::float8 as wait_p50,
  round((percentile_cont(0.95) within group (order by wait))::numeric, 1)::float8 as wait_p95,
  round((percentile_cont(0.5) within group (order by run))::numeric, 1)::float8 as run_p50,
  round((percentile_cont(0.95) within group (order by run))::numeric, 1)::float8 as run_p95,
  coalesce(sum((output ->> 'bytes_in')::bigint), 0)::bigint as bytes_in,
  coalesce(sum((output ->> 'bytes_out')::bigint), 0)::bigint as bytes_out
from job
group by kind, state
order by jobs desc, kind, state;


-- name: demo_unreadable
-- The errors of the jobs that could not read their file.
select (args ->> 'path') || ': ' || substr(errors[1] ->> 'error', length('JobCancelError: ') + 1) as reason
from /* schema */ river_job
where kind = 'compress_file' and errors[1] ->> 'error' like 'JobCancelError: cannot read %'
order by id;


-- name: demo_sample
-- 32 completed jobs whose files have at most a MiB, in an order that is the same in each run.
select id, args ->> 'path' as path
from /* schema */ river_job
where kind = 'compress_file' and state = 'completed'
  and (metadata #>> '{output,bytes_in}')::bigint <= 1048576
order by md5(id::text)
limit 32;


-- name: demo_problems
-- The problems of the jobs, each with the number of its check.
with wanted (job_type, state, attempt, errors, snoozes) as (
  values
    ('compress_file', 'completed', 1, 0, 0),
    ('unreadable file', 'cancelled', 1, 1, 0),
    ('count_files', 'completed', 1, 0, 0),
    ('fail_once', 'completed', 2, 1, 0),
    ('snooze_once', 'completed', 1, 0, 1),
    ('cancel_itself', 'cancelled', 1, 1, 0),
    ('run_until_cancelled', 'cancelled', 1, 1, 0)
), job as materialized (
  select
    id, kind, args, state::text, attempt, coalesce(cardinality(errors), 0) as errors,
    errors[cardinality(errors)] ->> 'error' as last_error,
    coalesce((metadata ->> 'snoozes')::int, 0) as snoozes,
    metadata #>> '{output,sha256}' as digest,
    case
      when kind = 'compress_file' and errors[1] ->> 'error' like 'JobCancelError: cannot read %'
        then 'unreadable file'
      else kind
    end as job_type
  from /* schema */ river_job
)
-- 0: jobs that did not end as expected, should not exist, or are missing
select
  0 as "check",
  format(
    'job %s (%s) is %s after %s attempts and %s errors, expected %s: %s',
    coalesce(inserted.id, job.id), job.kind, job.state, job.attempt, job.errors, wanted.state, job.last_error
  ) as problem
from unnest(@ids::bigint[]) as inserted (id)
full join job on job.id = inserted.id
left join wanted on wanted.job_type = job.job_type
where inserted.id is null or job.id is null
  or (job.state, job.attempt, job.errors, job.snoozes)
    is distinct from (wanted.state, wanted.attempt, wanted.errors, wanted.snoozes)
union all
-- 1: jobs that exist more than once; no two jobs of a run have the same kind and args
select 1, format('%s jobs %s %s', count(*), kind, args)
from job
group by kind, args
having count(*) > 1
union all
-- 2: completed jobs of files without a digest
select 2, format('job %s has none', id)
from job
where kind = 'compress_file' and state = 'completed' and coalesce(digest, '') !~ '^[0-9a-f]{64}$'
union all
-- 3: jobs whose digest is not the one that the server computes from the content
select 3, format('job %s: %s', job.id, job.args ->> 'path')
from unnest(@sample_ids::bigint[], @contents::bytea[]) as sample (id, content)
join job on job.id = sample.id
where job.digest is distinct from encode(sha256(sample.content), 'hex');
