-- Statements of the job cleaner, scheduler and rescuer on River's table of jobs.
--
-- Each uses an index under every plan: rows are limited before they are sorted or joined, and each kind of queue
-- filter is a statement of its own. A claim key (id, attempt, attempted_at) identifies an attempt; its time crosses
-- as microseconds since 2000, because some connections have their own codec for timestamps. Running jobs are
-- collected before they are sorted: a limited scan by id would read all finished jobs.


-- name: job_states_to_clean
-- The states with a job that ended longer ago than the retention. The first entry of the index shows it.
select given.state
from unnest(@states::text[], @retentions::interval[]) as given (state, retention)
where (
  select job.finalized_at
  from /* schema */ river_job as job
  where job.state = given.state::/* schema */ river_job_state and job.finalized_at is not null
  order by job.finalized_at
  limit 1
) < now() - given.retention;


-- name: job_ended
-- Up to @limit jobs behind the given position that ended in one state longer ago than @retention, oldest first, and
-- whether each belongs to the given queues and kinds. The caller starts behind the last job that it has read:
-- otherwise jobs that are kept longer, or cannot be deleted, would be read again each time. The time crosses as text
-- in ISO format, because it may be infinite, or in a year that Python lacks.
--
-- So a leader of few queues reads all jobs that others keep longer, but only once: a million such jobs take 1.3 s, 25
-- ms at most at a time, and 0.5 ms in each later pass. The index of claims leads to its own queues only, but in the
-- order in which jobs were due. Jobs that were due long before they ended would be read again in each pass (130 ms
-- for two queues of that million), and jobs that were cancelled before they were due would not be found.
select
  id, to_jsonb(finalized_at) #>> '{}',
  (queue = any(@queues::text[])) = @is_queue_allow_list::bool and (kind = any(@kinds::text[])) = @is_kind_allow_list::bool as is_meant
from /* schema */ river_job
where state = @state::text::/* schema */ river_job_state
  and finalized_at < now() - @retention::interval
  and finalized_at >= coalesce(@after_time::text::timestamptz, '-infinity')
  and (finalized_at, id) > (coalesce(@after_time::text::timestamptz, '-infinity'), coalesce(@after_id::bigint, 0))
order by finalized_at, id
limit @limit::bigint;


-- name: job_delete_ended
-- Delete those given jobs that ended in this state longer ago than @retention. Safe when two leaders run it at
-- once: locked rows are skipped.
with picked as materialized (
  select id
  from /* schema */ river_job
  where id = any(@ids::bigint[])
    and state = @state::text::/* schema */ river_job_state
    and finalized_at < now() - @retention::interval
  for update skip locked
)
delete from /* schema */ river_job
where id = any(array(select id from picked))
returning id;


-- name: job_due
-- The first of the scheduled and retryable jobs that are due within @ahead. A lane is a range of the index in which
-- jobs are in the order of their due times. So a million jobs that are not due yet cost nothing.
with recursive lanes as (
  select state, (
    select job.queue
    from /* schema */ river_job as job
    where job.state = given.state
    order by job.queue
    limit 1
  ) as queue
  from unnest(array['retryable', 'scheduled']::/* schema */ river_job_state[]) as given (state)
  union all
  select lanes.state, (
    select job.queue
    from /* schema */ river_job as job
    where job.state = lanes.state and job.queue > lanes.queue
    order by job.queue
    limit 1
  )
  from lanes
  where lanes.queue is not null
)
select due.id
from lanes
cross join generate_series(1, 4) as ranks (place)
cross join lateral (
  select job.id, job.priority, job.scheduled_at
  from /* schema */ river_job as job
  where job.state = lanes.state and job.queue = lanes.queue and job.priority = ranks.place::smallint
    and job.scheduled_at <= now() + @ahead::interval and job.id <> all(@skipped::bigint[])
    -- queues: lanes.queue
  order by job.scheduled_at, job.id
  limit @limit::bigint
) as due
order by due.priority, due.scheduled_at, due.id
limit @limit::bigint;


-- name: job_due_in_queues
-- The scheduled and retryable jobs of some queues that are due within @ahead.
select due.id
from unnest(array['retryable', 'scheduled']::/* schema */ river_job_state[]) as states (state)
cross join unnest(@queues::text[]) as queues (queue)
cross join generate_series(1, 4) as ranks (place)
cross join lateral (
  select job.id, job.priority, job.scheduled_at
  from /* schema */ river_job as job
  where job.state = states.state and job.queue = queues.queue and job.priority = ranks.place::smallint
    and job.scheduled_at <= now() + @ahead::interval and job.id <> all(@skipped::bigint[])
  order by job.scheduled_at, job.id
  limit @limit::bigint
) as due
order by due.priority, due.scheduled_at, due.id
limit @limit::bigint;


-- name: job_schedule
-- Make due jobs available. Of the jobs with one unique key the first is kept, unless a job that is not among them
-- holds the key. The others are discarded. A job that would keep its key when it is discarded stays as it is.
-- riverpy's clients are notified of jobs that become due later, to half a second, because no other notification will
-- come then.
--
-- Jobs are discarded before any becomes available, since one may have the key that another needs: hence the count. A
-- rival that is not committed yet makes this statement wait, or fail, at the unique index. Safe when two leaders run
-- it at once: rows that are locked or no longer due are skipped.
with due as materialized (
  select id, priority, scheduled_at, queue,
    case when unique_states is not null and /* schema */ river_job_state_in_bitmask(unique_states, 'available')
      then unique_key
    end as unique_key,
    /* schema */ river_job_state_in_bitmask(unique_states, 'discarded') as holds_on
  from /* schema */ river_job
  where id = any(@ids::bigint[]) and state in ('retryable', 'scheduled')
    and scheduled_at <= now() + @ahead::interval
  for no key update skip locked
), ranked as materialized (
  select due.*, row_number() over (partition by unique_key order by priority, scheduled_at, id) as place
  from due
  where unique_key is not null
), beaten as materialized (
  select ranked.id, ranked.holds_on
  from ranked
  left join lateral (
    select holder.id
    from /* schema */ river_job as holder
    where holder.unique_key = ranked.unique_key and holder.unique_states is not null
      and /* schema */ river_job_state_in_bitmask(holder.unique_states, holder.state)
    limit 1
  ) as holder on true
  where ranked.place > 1
    or (holder.id is not null and not exists (select from due as among where among.id = holder.id))
), discarded as (
  update /* schema */ river_job as job
  set
    state = 'discarded',
    finalized_at = now(),
    metadata = case
      when jsonb_typeof(job.metadata) in ('object', 'array')
      then job.metadata || '{"unique_key_conflict": "scheduler_discarded"}'
      else jsonb_build_array(job.metadata, '{"unique_key_conflict": "scheduler_discarded"}'::jsonb)
    end
  where job.id = any(array(select id from beaten where not holds_on))
  returning job.id
), made as (
  update /* schema */ river_job as job
  set state = 'available'
  where job.id = any(array(select id from due except select id from beaten))
    and (select count(*) from discarded) >= 0
  returning job.id, job.queue, job.scheduled_at
), notified as (
  select pg_notify(
    -- include: job_parts.due_message
  )
  from (select distinct queue from made where scheduled_at <= now()) as waiting
  where (select pg_notification_queue_usage() < 0.9)
), announced as (
  select pg_notify(
    -- include: job_parts.due_later_message
  )
  from (
    select distinct
      job.queue,
      -- include: job_parts.due_in_half_seconds
      as seconds
    from made as job
    where job.scheduled_at > now()
  ) as later
  where (select pg_notification_queue_usage() < 0.9)
  group by queue
)
select
  (select count(*) from made),
  (select count(*) from discarded),
  array(
    select given.id
    from unnest(@ids::bigint[]) as given (id)
    where not exists (select from made where made.id = given.id)
      and not exists (select from discarded where discarded.id = given.id)
  )
where (select count(*) from notified) + (select count(*) from announced) >= 0;


-- name: job_lock_limit
-- Set how long a statement of this transaction may wait for a lock.
select set_config('lock_timeout', (@milliseconds::bigint)::text, true);


-- name: job_running_of
-- The running jobs that the given clients claimed last. The client is not read for jobs in @skipped, because they are
-- damaged.
with found as materialized (
  select id, attempt, attempted_at, attempted_by[array_upper(attempted_by, 1)] as client_id
  from /* schema */ river_job
  where state = 'running' and id > @after::bigint
    -- queues: queue
    and attempted_at is not null
    and case when id = any(@skipped::bigint[]) then null else attempted_by[array_upper(attempted_by, 1)] end = any(@client_id::text[])
)
select id, attempt, timestamptz_send(attempted_at), client_id
from found
order by id
limit @limit::bigint;


-- name: job_stuck
-- The ids of the jobs that have been running for longer than @age. Wide columns are not read: a damaged one would
-- fail the statement for all jobs.
with found as materialized (
  select id
  from /* schema */ river_job
  where state = 'running' and id > @after::bigint
    -- queues: queue
    and attempted_at < now() - least(@age::interval, interval '1000 years')
)
select id
from found
order by id
limit @limit::bigint;


-- name: job_stuck_rows
-- The given jobs that have been running for longer than @age, with the seconds that they have been running.
select
  id, args::text, attempt, timestamptz_send(attempted_at), attempted_by, timestamptz_send(created_at), errors::text[],
  timestamptz_send(finalized_at), kind, max_attempts, metadata::text, priority, queue, state::text,
  timestamptz_send(scheduled_at), tags::text[], unique_key, unique_states::int,
  extract(epoch from now() - /* finite */ (attempted_at))::float8
from /* schema */ river_job
where id = any(@id::bigint[]) and state = 'running' and attempted_at < now() - least(@age::interval, interval '1000 years')
order by id;


-- name: job_rescue
-- End attempts whose client is gone. Each attempt counts, and gets an error. A job with attempts left becomes
-- available if it is due within 5 seconds, as in River, and its queue is notified of the time. Safe when two leaders run it at
-- once: an attempt is rescued once, and locked rows are skipped.
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
  returning job.id, job.state, job.queue, job.scheduled_at
), notified as (
  select pg_notify(
    -- include: job_parts.due_message
  )
  from (select distinct queue from rescued where state = 'available' and scheduled_at <= now()) as waiting
  where (select pg_notification_queue_usage() < 0.9)
), announced as (
  select pg_notify(
    -- include: job_parts.due_later_message
  )
  from (
    select distinct
      job.queue,
      -- include: job_parts.due_in_half_seconds
      as seconds
    from rescued as job
    where job.state = 'available' and job.scheduled_at > now()
  ) as later
  where (select pg_notification_queue_usage() < 0.9)
  group by queue
)
select id, state::text
from rescued
where (select count(*) from notified) + (select count(*) from announced) >= 0;


-- name: job_expired
-- The ids of waiting jobs whose time `riverpy:expires_at` has passed. Values in another form than that of an insert
-- are ignored; of a long text only the beginning is matched. The planner chooses between the index of states and the index of metadata, by which has fewer rows, or
-- reads both. So the jobs of history are not read, unless nearly all of them expire.
with found as materialized (
  select id
  from /* schema */ river_job
  where state in ('available', 'pending', 'retryable', 'scheduled') and metadata ? 'riverpy:expires_at'
    -- queues: queue
    and (metadata ->> 'riverpy:expires_at') collate "C"
      <= (select to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
    and left(metadata ->> 'riverpy:expires_at', 28) ~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{6}Z$'
)
select id
from found
where id <> all(@skipped::bigint[])
order by id
limit @limit::bigint;


-- name: job_cancel_expired
-- Cancel the given jobs if they still wait and have expired. Their attempts do not change. Safe when two leaders run
-- it at once: locked rows are skipped.
with picked as materialized (
  select id
  from /* schema */ river_job
  where id = any(@ids::bigint[]) and state in ('available', 'pending', 'retryable', 'scheduled')
    and (metadata ->> 'riverpy:expires_at') collate "C"
      <= (select to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
    and left(metadata ->> 'riverpy:expires_at', 28) ~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{6}Z$'
  order by id
  for no key update skip locked
)
update /* schema */ river_job as job
set
  state = 'cancelled',
  finalized_at = now(),
  errors = array_append(case
    when cardinality(job.errors) >= 100 then job.errors[:1] || job.errors[cardinality(job.errors) - 97:]
    else job.errors
  end, jsonb_build_object(
    'at', rtrim(rtrim(to_char(now() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), '0'), '.') || 'Z',
    'attempt', job.attempt, 'error', @error::text, 'trace', ''
  ))
where job.id = any(array(select id from picked))
returning job.id;
