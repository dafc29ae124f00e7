-- Statements on River's table of jobs that take running jobs from clients that work them no more.
--
-- An attempt is fenced by its claim key (id, attempt, attempted_at). Its time crosses as microseconds since 2000, since
-- some of the connections have a codec of their own for timestamps. Running jobs are collected before they are sorted:
-- a limited walk along the ids would read all jobs that ended.


-- name: job_running_of
-- The running jobs that the given clients claimed last. Who claimed a job is not read of the skipped ones, which are
-- damaged.
with found as materialized (
  select id, attempt, attempted_at, attempted_by[array_upper(attempted_by, 1)] as client_id
  from /* schema */ river_job
  where state = 'running' and id > @after::bigint
    and attempted_at is not null
    and case when id = any(@skipped::bigint[]) then null else attempted_by[array_upper(attempted_by, 1)] end = any(@client_id::text[])
)
select id, attempt, timestamptz_send(attempted_at), client_id
from found
order by id
limit @limit::bigint;


-- name: job_running_of_in_queues
-- The same in some queues.
with found as materialized (
  select id, attempt, attempted_at, attempted_by[array_upper(attempted_by, 1)] as client_id
  from /* schema */ river_job
  where state = 'running' and id > @after::bigint and queue = any(@queues::text[])
    and attempted_at is not null
    and case when id = any(@skipped::bigint[]) then null else attempted_by[array_upper(attempted_by, 1)] end = any(@client_id::text[])
)
select id, attempt, timestamptz_send(attempted_at), client_id
from found
order by id
limit @limit::bigint;


-- name: job_running_of_except_queues
-- The same in all queues but some.
with found as materialized (
  select id, attempt, attempted_at, attempted_by[array_upper(attempted_by, 1)] as client_id
  from /* schema */ river_job
  where state = 'running' and id > @after::bigint and queue <> all(@queues::text[])
    and attempted_at is not null
    and case when id = any(@skipped::bigint[]) then null else attempted_by[array_upper(attempted_by, 1)] end = any(@client_id::text[])
)
select id, attempt, timestamptz_send(attempted_at), client_id
from found
order by id
limit @limit::bigint;


-- name: job_stuck
-- The ids of the jobs that run for longer than @age. No wide column is read, since one that is damaged would fail the
-- statement for all.
with found as materialized (
  select id
  from /* schema */ river_job
  where state = 'running' and id > @after::bigint
    and attempted_at < now() - least(@age::interval, interval '1000 years')
)
select id
from found
order by id
limit @limit::bigint;


-- name: job_stuck_in_queues
-- The same in some queues.
with found as materialized (
  select id
  from /* schema */ river_job
  where state = 'running' and id > @after::bigint and queue = any(@queues::text[])
    and attempted_at < now() - least(@age::interval, interval '1000 years')
)
select id
from found
order by id
limit @limit::bigint;


-- name: job_stuck_except_queues
-- The same in all queues but some.
with found as materialized (
  select id
  from /* schema */ river_job
  where state = 'running' and id > @after::bigint and queue <> all(@queues::text[])
    and attempted_at < now() - least(@age::interval, interval '1000 years')
)
select id
from found
order by id
limit @limit::bigint;


-- name: job_stuck_rows
-- Those of the given jobs that run for longer than @age, with the seconds that they do.
select
  id, args::text, attempt, timestamptz_send(attempted_at), attempted_by, timestamptz_send(created_at), errors::text[],
  timestamptz_send(finalized_at), kind, max_attempts, metadata::text, priority, queue, state::text,
  timestamptz_send(scheduled_at), tags::text[], unique_key, unique_states::int,
  extract(epoch from now() - /* finite */ (attempted_at))::float8
from /* schema */ river_job
where id = any(@id::bigint[]) and state = 'running' and attempted_at < now() - least(@age::interval, interval '1000 years')
order by id;


-- name: job_rescue
-- End attempts whose client is gone: each counts, with an error. What can run again is available if it is due within
-- River's 5 seconds for that, and its queue is told. Safe when two leaders run it at once: an attempt is rescued once,
-- and rows that are locked are passed over.
with locked as materialized (
  select id
  from /* schema */ river_job
  where id = any(@id::bigint[]) and state = 'running'
  order by id
  for no key update skip locked
), rescued as (
  update /* schema */ river_job as job
  set
    state = case
      when job.metadata -> 'cancel_attempted_at' is not null then 'cancelled'
      when job.attempt >= job.max_attempts then 'discarded'
      when given.delay <= 5 then 'available'
      else 'retryable'
    end::/* schema */ river_job_state,
    finalized_at = case
      when job.metadata -> 'cancel_attempted_at' is not null or job.attempt >= job.max_attempts then now()
    end,
    scheduled_at = case
      when job.metadata -> 'cancel_attempted_at' is not null or job.attempt >= job.max_attempts then job.scheduled_at
      else now() + given.delay * interval '1 second'
    end,
    errors = array_append(case
      when cardinality(job.errors) >= 100 then job.errors[:1] || job.errors[cardinality(job.errors) - 97:]
      else job.errors
    end, jsonb_build_object(
      'at', rtrim(rtrim(to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '0'), '.') || 'Z',
      'attempt', job.attempt, 'error', @error::text, 'trace', ''
    )),
    metadata = case
      when jsonb_typeof(job.metadata) = 'object' then job.metadata || jsonb_build_object(
        'river:rescue_count',
        case
          when jsonb_typeof(job.metadata -> 'river:rescue_count') = 'number'
          then trunc((job.metadata ->> 'river:rescue_count')::numeric)
          else 0
        end + 1
      ) || case
        when cardinality(job.errors) >= 100
        then jsonb_build_object(
          'riverpy:errors_dropped',
          cardinality(job.errors) - 99 + case
            when jsonb_typeof(job.metadata -> 'riverpy:errors_dropped') = 'number'
            then trunc((job.metadata ->> 'riverpy:errors_dropped')::numeric)
            else 0
          end
        )
        else '{}'
      end
      else job.metadata
    end
  from unnest(@id::bigint[], @attempt::smallint[], @attempted_at::bigint[], @delay::float8[])
    as given (id, attempt, attempted_at, delay)
  where job.id = any(array(select id from locked)) and job.id = given.id
    and job.attempt = given.attempt and timestamptz_send(job.attempted_at) = int8send(given.attempted_at)
  returning job.id, job.state, job.queue
), told as (
  select pg_notify(
    /* schema of river_job */ current_schema()::text || '.river_insert', '{"queue": "' || queue || '"}'
  )
  from (select distinct queue from rescued where state = 'available') as waiting
  where (select pg_notification_queue_usage() < 0.9)
)
select id, state::text
from rescued
where (select count(*) from told) >= 0;
