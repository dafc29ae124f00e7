-- Statements on River's table of jobs, except for inserts (river_job_insert.sql).
--
-- A statement that returns whole jobs lists the columns in the order of riverpy.job.JobColumn. A claim key (id,
-- attempt, attempted_at) identifies an attempt. The attempt number alone is not enough: it is used again after a job
-- was released, and after a crash of the server that loses the commit of a claim. A cancel mark is a key of the
-- metadata. It is read with `->`, which finds it only in an object; `?` also finds the text in an array or string.


-- name: job_claim
-- Claim up to @limit due jobs of one queue, behind a position in their order and up to @last_priority. Jobs in
-- @skipped are left out. The result has no order. The array form uses the primary key; a join would be planned as a
-- sequential scan. @kinds null means all kinds. The form of this condition makes the planner expect that nearly all
-- rows pass; otherwise it would read and sort the whole backlog.
with picked as materialized (
  select id
  from /* schema */ river_job
  where state = 'available' and queue = @queue and scheduled_at <= now() and id <> all(@skipped::bigint[])
    and case when kind <> all(@kinds::text[]) then null else id end is not null
    and (priority, scheduled_at, id) > (@priority::smallint, @scheduled_at::timestamptz, @after_id::bigint)
    and priority <= @last_priority::smallint
  order by priority, scheduled_at, id
  limit @limit::bigint
  for update skip locked
)
update /* schema */ river_job as job
set
  -- include: job_parts.claimed_values
where job.id = any(array(select id from picked))
returning
  -- include: job_parts.claimed_columns
;


-- name: job_claim_queues
-- Claim due jobs of several queues, up to the limit of each. It reads the index from its beginning once for each
-- queue. The result has no order. @kinds null means all kinds, and its condition has the form of job_claim.
with picked as materialized (
  select found.id
  from unnest(@queue::text[], @limit::bigint[]) as wanted (queue, job_count)
  cross join lateral (
    select job.id
    from /* schema */ river_job as job
    where job.state = 'available' and job.queue = wanted.queue and job.scheduled_at <= now()
      and case when job.kind <> all(@kinds::text[]) then null else job.id end is not null
    order by job.priority, job.scheduled_at, job.id
    limit wanted.job_count
    for update skip locked
  ) as found
)
update /* schema */ river_job as job
set
  -- include: job_parts.claimed_values
where job.id = any(array(select id from picked))
returning
  -- include: job_parts.claimed_columns
;


-- name: job_claim_one
-- Claim one job that waits, also before it is due, and return it. A test works single jobs this way. The id is a text,
-- because a connection of the caller may have its own codecs.
update /* schema */ river_job as job
set
  -- include: job_parts.claimed_values
where job.id = @id::text::bigint and job.state in ('available', 'retryable', 'scheduled')
returning
  -- include: job_parts.columns
;


-- name: job_find_next
-- The next job for one that works all jobs in their order: a due one or, if @at_any_time is 't', the one that is due
-- first. A transaction of a test may be older than its jobs, so the clock decides. Null means all queues or kinds. The
-- values are texts, as in job_claim_one.
with clock as materialized (select clock_timestamp() as now)
select job.id::text
from /* schema */ river_job as job, clock
where job.state in ('available', 'retryable', 'scheduled')
  and (job.scheduled_at <= clock.now or @at_any_time::text = 't')
  and job.queue = any(coalesce(@queues::text[], array[job.queue]))
  and job.kind = any(coalesce(@kinds::text[], array[job.kind]))
order by
  greatest(job.scheduled_at, clock.now), case when job.scheduled_at <= clock.now then job.priority end, job.scheduled_at,
  job.id
limit 1;


-- name: job_claim_time
-- The server's time, which decides what is due.
select now();


-- name: job_next
-- The job that a claim of one job would take, with its position in the order of claims.
select priority, scheduled_at, id
from /* schema */ river_job
where state = 'available' and queue = @queue and scheduled_at <= now() and id <> all(@skipped::bigint[])
  and case when kind <> all(@kinds::text[]) then null else id end is not null
order by priority, scheduled_at, id
limit 1
for update skip locked;


-- name: job_position
-- The position of one job in the order of claims, if it can be claimed.
select priority, scheduled_at, id
from /* schema */ river_job
where id = @id and state = 'available' and queue = @queue and scheduled_at <= now()
for update skip locked;


-- name: job_complete
-- Store attempts that just completed. @age is the seconds since each one ended. The server's clock is read at the
-- statement, because the transaction may have begun earlier and waited.
update /* schema */ river_job as job
set state = 'completed', finalized_at = statement_timestamp() - done.age * interval '1 second'
from unnest(@id::bigint[], @attempt::smallint[], @attempted_at::timestamptz[], @age::float8[])
  as done (id, attempt, attempted_at, age)
where job.id = done.id and job.state = 'running'
  and job.attempt = done.attempt and job.attempted_at = done.attempted_at
returning job.id;


-- name: job_store_results
-- Store attempts of any outcome. A job with a cancel mark that would run again is cancelled instead. The mark is read
-- from the row itself: a joined copy is outdated if the mark is set while this statement waits. The first and the
-- newest 99 errors are kept. Updates are merged as `||` merges them, so that metadata that are no object are kept
-- too; up to PostgreSQL 13 `||` refuses a number, text or null.
update /* schema */ river_job as job
set
  state = case
    when done.is_final is null and job.metadata -> 'cancel_attempted_at' is not null then 'cancelled'
    else done.state::/* schema */ river_job_state
  end,
  finalized_at = case
    when done.is_final is null and job.metadata -> 'cancel_attempted_at' is not null then statement_timestamp()
    when done.is_final then statement_timestamp() - done.seconds_since_end * interval '1 second'
  end,
  attempt = case
    when done.is_final is null and job.metadata -> 'cancel_attempted_at' is not null then job.attempt
    else done.new_attempt
  end,
  scheduled_at = case
    when done.is_final is null and job.metadata -> 'cancel_attempted_at' is null
    then coalesce(statement_timestamp() + done.delay * interval '1 second', job.scheduled_at)
    else job.scheduled_at
  end,
  errors = case
    when done.error is null then job.errors
    else array_append(case
      when cardinality(job.errors) >= 100 then job.errors[:1] || job.errors[cardinality(job.errors) - 97:]
      else job.errors
    end, done.error::jsonb)
  end,
  metadata = case
    when done.error is not null and cardinality(job.errors) >= 100 and jsonb_typeof(job.metadata) = 'object'
    then job.metadata || coalesce(done.metadata_updates::jsonb, '{}') || jsonb_build_object(
      'riverpy:errors_dropped',
      cardinality(job.errors) - 99 + case
        when jsonb_typeof(job.metadata -> 'riverpy:errors_dropped') = 'number'
        then trunc((job.metadata ->> 'riverpy:errors_dropped')::numeric)
        else 0
      end
    )
    when done.metadata_updates is null then job.metadata
    when jsonb_typeof(job.metadata) in ('object', 'array') then job.metadata || done.metadata_updates::jsonb
    else jsonb_build_array(job.metadata, done.metadata_updates::jsonb)
  end
from unnest(
  @id::bigint[], @attempt::smallint[], @attempted_at::timestamptz[], @state::text[], @is_final::bool[],
  @seconds_since_end::float8[], @new_attempt::smallint[], @delay::float8[], @error::text[], @metadata_updates::text[]
) as done (id, attempt, attempted_at, state, is_final, seconds_since_end, new_attempt, delay, error, metadata_updates)
where job.id = done.id and job.state = 'running'
  and job.attempt = done.attempt and job.attempted_at = done.attempted_at
returning job.id, job.state::text;


-- name: job_merge_running_metadata
-- Merge an object into the metadata of a running attempt, as job_store_results does. The statement may run in a
-- transaction of the caller, whose connection may have its own codecs, so all values are texts. @attempted_at is in
-- microseconds since 2000. The statement waits for a lock of the row at most @lock_timeout; null keeps the session's
-- timeout.
with waiting as materialized (
  select case when @lock_timeout::text is not null then set_config('lock_timeout', @lock_timeout::text, true) end
)
update /* schema */ river_job as job
set metadata = case
  when jsonb_typeof(job.metadata) in ('object', 'array') then job.metadata || @updates::text::jsonb
  else jsonb_build_array(job.metadata, @updates::text::jsonb)
end
where (select count(*) from waiting) = 1 and job.id = @id::text::bigint and job.state = 'running' and job.attempt = @attempt::text::smallint
  and job.attempted_at
    = timestamptz '2000-01-01 00:00:00+00' + @attempted_at::text::bigint * interval '1 microsecond'
returning true;


-- name: job_store_progress
-- Store the progress of running attempts. @attempted_at is in microseconds since 2000. A row that another session has
-- locked is left out. So is a row whose metadata are no object: a join would add an element at each report.
with locked as (
  select job.id, given.progress
  from /* schema */ river_job as job
  join unnest(@id::bigint[], @attempt::smallint[], @attempted_at::bigint[], @progress::text[])
    as given (id, attempt, claim_time, progress) on job.id = given.id
  where job.id = any(@id::bigint[]) and job.state = 'running' and job.attempt = given.attempt
    and job.attempted_at = timestamptz '2000-01-01 00:00:00+00' + given.claim_time * interval '1 microsecond'
  for no key update of job skip locked
), stored as (
  update /* schema */ river_job as job
  set metadata = job.metadata || jsonb_build_object('riverpy:progress', locked.progress::jsonb)
  from locked
  where job.id = locked.id and jsonb_typeof(job.metadata) = 'object'
)
select id
from locked;


-- name: job_complete_running
-- Complete a running attempt in the transaction of the caller. The values are texts, as in job_merge_running_metadata.
update /* schema */ river_job as job
set
  state = 'completed',
  finalized_at = statement_timestamp(),
  metadata = case
    when @updates::text is null then job.metadata
    when jsonb_typeof(job.metadata) in ('object', 'array') then job.metadata || @updates::text::jsonb
    else jsonb_build_array(job.metadata, @updates::text::jsonb)
  end
where job.id = @id::text::bigint and job.state = 'running' and job.attempt = @attempt::text::smallint
  and job.attempted_at
    = timestamptz '2000-01-01 00:00:00+00' + @attempted_at::text::bigint * interval '1 microsecond'
returning
  -- include: job_parts.columns
;


-- name: job_notify_queues
-- Notify the clients of these queues that a job is due again.
select pg_notify(
  -- include: job_parts.due_message
)
from unnest(@queue::text[]) as given (queue)
where (select pg_notification_queue_usage() < 0.9);


-- name: job_due_times
-- When available jobs of some queues become due within 6 seconds. A retry is available up to 5 seconds early. Each
-- priority is a range of the index for claims, so due jobs are not read.
select distinct given.queue, found.seconds
from unnest(@queue::text[]) as given (queue)
cross join generate_series(1, 4) as ranks (place)
cross join lateral (
  select
    -- include: job_parts.due_in_half_seconds
    as seconds
  from /* schema */ river_job as job
  where job.state = 'available' and job.queue = given.queue and job.priority = ranks.place::smallint
    and job.scheduled_at > now() and job.scheduled_at <= now() + interval '6 seconds'
) as found;


-- name: job_notify_due_times
-- Notify the clients of some queues of when jobs become due.
select pg_notify(
  -- include: job_parts.due_later_message
)
from unnest(@queue::text[], @seconds::float8[]) as given (queue, seconds)
where (select pg_notification_queue_usage() < 0.9)
group by queue;


-- name: job_merge_metadata
-- Merge the metadata of late attempts into rows that other sessions made final during these attempts. Merge them as
-- job_store_results does, and return the rows. Locked rows are left out.
with locked as (
  select job.id, done.updates
  from /* schema */ river_job as job
  join unnest(@id::bigint[], @attempt::smallint[], @attempted_at::timestamptz[], @updates::text[])
    as done (id, attempt, attempted_at, updates) on job.id = done.id
  where job.id = any(@id::bigint[]) and job.finalized_at is not null
    and job.attempt = done.attempt and job.attempted_at = done.attempted_at
  for no key update of job skip locked
)
update /* schema */ river_job as job
set metadata = case
  when locked.updates is null then job.metadata
  when jsonb_typeof(job.metadata) in ('object', 'array') then job.metadata || locked.updates::jsonb
  else jsonb_build_array(job.metadata, locked.updates::jsonb)
end
from locked
where job.id = locked.id
returning
  job.id, job.args::text, job.attempt, job.attempted_at, job.attempted_by, job.created_at, job.errors::text[],
  job.finalized_at, job.kind, job.max_attempts, job.metadata::text, job.priority, job.queue, job.state::text,
  job.scheduled_at, job.tags, job.unique_key, job.unique_states::int;


-- name: job_lock_attempts
-- Lock the given jobs that no other session has locked. So the next statement of the transaction does not wait.
select job.id
from /* schema */ river_job as job
where job.id = any(@id::bigint[]) and job.state = 'running'
order by job.id
for no key update skip locked;


-- name: job_stored_outcomes
-- The stored state of the given jobs. It distinguishes a refused result from one that was stored before.
select job.id, job.attempt, job.attempted_at, job.state::text, coalesce(cardinality(job.errors), 0)
from /* schema */ river_job as job
where job.id = any(@id::bigint[]);


-- name: job_claimed_by
-- The running jobs that this client claimed last, longer ago than a claim may take. The column of the client is not
-- read for jobs in @skipped, because they are damaged.
select job.id, job.attempt, job.attempted_at
from /* schema */ river_job as job
where job.state = 'running' and job.queue = any(@queue::text[])
  and case when job.id = any(@skipped::bigint[]) then null else job.attempted_by[array_upper(job.attempted_by, 1)] end
    = @client_id
  and job.attempted_at < now() - @age::float8 * interval '1 second';


-- name: job_release
-- Release claimed attempts. They do not count, because they have not ended. The queues are notified. A job with a
-- cancel mark is cancelled, and keeps its attempt and time as in job_store_results.
with given_back as (
  update /* schema */ river_job as job
  set
    state = case when job.metadata -> 'cancel_attempted_at' is not null then 'cancelled' else 'available' end
      ::/* schema */ river_job_state,
    finalized_at = case when job.metadata -> 'cancel_attempted_at' is not null then now() end,
    attempt = case
      when job.metadata -> 'cancel_attempted_at' is not null then job.attempt
      else greatest(job.attempt - 1, 0)
    end,
    scheduled_at = case
      when job.metadata -> 'cancel_attempted_at' is not null then job.scheduled_at
      else now()
    end
  from unnest(@id::bigint[], @attempt::smallint[], @attempted_at::timestamptz[])
    as lost (id, attempt, attempted_at)
  where job.id = lost.id and job.state = 'running'
    and job.attempt = lost.attempt and job.attempted_at = lost.attempted_at
  returning job.id, job.state, job.queue
), notified as (
  select pg_notify(
    -- include: job_parts.due_message
  )
  from (select distinct queue from given_back where state = 'available') as waiting
  where (select pg_notification_queue_usage() < 0.9)
)
select id
from given_back
where (select count(*) from notified) >= 0;


-- name: job_cancel_marks
-- The given running jobs that have a cancel mark.
select job.id
from /* schema */ river_job as job
where job.id = any(@id::bigint[]) and job.state = 'running' and job.metadata -> 'cancel_attempted_at' is not null;


-- name: job_any_available
-- Whether a queue has a job that is due now or soon: a retry is available 5 seconds before it is due. Jobs in
-- @skipped and of other kinds than @kinds do not count. Each queue is read in the order of its index. Without an
-- order, a long backlog makes a scan of the whole table look cheap, even if all finished jobs come first in it.
select exists (
  select 1
  from unnest(@queue::text[]) as given (queue)
  cross join lateral (
    select job.id
    from /* schema */ river_job as job
    where job.state = 'available' and job.queue = given.queue and job.scheduled_at <= now() + interval '6 seconds'
      and job.id <> all(@skipped::bigint[])
      and case when job.kind <> all(@kinds::text[]) then null else job.id end is not null
    order by job.priority, job.scheduled_at, job.id
    limit 1
  ) as waiting
);


-- name: job_get
-- The given jobs that exist, newest first.
select
  -- include: job_parts.columns
from /* schema */ river_job
where id = any(@id::bigint[])
order by id desc;


-- name: job_list
-- The newest jobs in these states, of these kinds and queues. Null means all. An `or` would prevent the use of the
-- index. Wide columns are not read: a damaged one would fail the statement for all jobs.
select id
from /* schema */ river_job
where state = any(@state::text[]::/* schema */ river_job_state[])
  and kind = any(coalesce(@kind::text[], array[kind]))
  and queue = any(coalesce(@queue::text[], array[queue]))
order by id desc
limit @limit::bigint;


-- name: job_cancel
-- Cancel a job. A running one gets a cancel mark, and its client is notified. The clients that wait for another one are
-- notified of its end. A final one stays as it is. In that case the locked row is returned: a statement that has waited
-- for another session's commit would otherwise return the row from before it. Metadata of a running job that are no
-- object are moved under a key, so that the mark can be one.
with found as (
  select *
  from /* schema */ river_job
  where id = @id
  for update
), notified as (
  select pg_notify(
    /* schema of river_job */ current_schema()::text || '.river_control',
    json_build_object('action', 'cancel', 'job_id', id, 'queue', queue)::text
  )
  from found
  where finalized_at is null and (select pg_notification_queue_usage() < 0.9)
), end_notified as (
  select pg_notify(
    /* schema of river_job */ current_schema()::text || '.riverpy_job',
    json_build_object('jobs', json_build_array(json_build_array(id, 'cancelled')))::text
  )
  from found
  where finalized_at is null and state <> 'running' and metadata -> 'riverpy:notify' is not null
    and (select pg_notification_queue_usage() < 0.9)
), given as (
  -- include: job_parts.cancel_mark
), cancelled as (
  update /* schema */ river_job as job
  set
    -- include: job_parts.cancelled_values
  from found, given
  where job.id = found.id and found.finalized_at is null
  returning job.*
), result as (
  select * from cancelled
  union all
  select * from found where finalized_at is not null
)
select
  -- include: job_parts.columns
from result
left join notified on true
left join end_notified on true;


-- name: job_retry
-- Make a job available now, without a time at which it expires, and notify its queue. A running job, and one that is
-- due already, stay as they are. In that case the locked row is returned, as by job_cancel.
with found as (
  select *
  from /* schema */ river_job
  where id = @id
  for update
), retried as (
  update /* schema */ river_job as job
  set
    -- include: job_parts.retried_values
  from found
  where job.id = found.id and found.state <> 'running'
    and not (found.state = 'available' and found.scheduled_at < now())
  returning job.*
), notified as (
  select pg_notify(
    -- include: job_parts.due_message
  )
  from retried
  where (select pg_notification_queue_usage() < 0.9)
), result as (
  select * from retried
  union all
  select * from found where not exists (select from retried)
)
select
  -- include: job_parts.columns
from result
left join notified on true;


-- name: job_update
-- Merge an object into the metadata of a job in any state, as job_store_results does.
update /* schema */ river_job as job
set metadata = case
  when jsonb_typeof(job.metadata) in ('object', 'array') then job.metadata || @updates::text::jsonb
  else jsonb_build_array(job.metadata, @updates::text::jsonb)
end
where id = @id
returning
  -- include: job_parts.columns
;
