-- Statements that delete one job, and that delete, retry or cancel jobs by filters.
--
-- A change of many jobs reads their ids first, and then changes some of them in each statement. That statement repeats
-- the filters under the locks of the rows: a job that no longer passes stays as it is. Rows that another session has
-- locked are left out, so that no statement waits, and two of them never block each other.


-- name: job_delete
-- Delete a job unless it is running. The locked row is returned, so its state tells what was done.
with found as (
  select *
  from /* schema */ river_job
  where id = @id
  for update
), deleted as (
  delete from /* schema */ river_job as job
  using found
  where job.id = found.id and found.state <> 'running'
  returning job.id
)
select
  -- include: job_parts.columns
from found
where (select count(*) from deleted) >= 0;


-- name: job_delete_many
-- Delete the first @limit jobs with these filters, except running and locked ones, and return them in no particular
-- order. The server has no statistics on the content of metadata; the array makes it use their index.
with picked as materialized (
  select id
  from /* schema */ river_job
  where state <> 'running'
  -- include: job_filters.job_filters
  -- when metadata: and id = any(array(select id from /* schema */ river_job where metadata @> @metadata::text::jsonb))
  order by id
  limit @limit::bigint
  for update skip locked
)
delete from /* schema */ river_job
where id = any(array(select id from picked))
returning
  -- include: job_parts.columns
;


-- name: job_get_last_id
-- The largest id. Jobs that are inserted later are not changed.
select coalesce(max(id), 0) from /* schema */ river_job;


-- name: job_list_ids_in_range
-- The ids of the next jobs with these filters, in their order.
select id
from (
  select id
  from /* schema */ river_job
  where true
  -- include: job_filters.job_filters
  -- when metadata: offset 0
) as found
where id > @after_id::bigint and id <= @last_id::bigint
order by id
limit @limit::bigint;


-- name: job_retry_batch
-- Retry these jobs as job_retry does, and notify each queue once. Of the jobs that need one unique key, the first is
-- retried, unless another job has the key: the ids of the others are returned. An insert in another session can still
-- take a key first; then the statement fails at the unique index.
with found as materialized (
  select id, state, scheduled_at,
    case when unique_states is not null and /* schema */ river_job_state_in_bitmask(unique_states, 'available')
      then unique_key
    end as unique_key,
    /* schema */ river_job_state_in_bitmask(unique_states, state) as has_key
  from /* schema */ river_job
  where id = any(@batch::bigint[])
  -- include: job_filters.job_filters
  order by id
  for update skip locked
), chosen as materialized (
  select id, unique_key, has_key, row_number() over (partition by unique_key order by id) as place
  from found
  where state <> 'running' and not (state = 'available' and scheduled_at < now())
), refused as materialized (
  select chosen.id
  from chosen
  where chosen.unique_key is not null and (
    (chosen.place > 1 and not chosen.has_key)
    or exists (
      select
      from /* schema */ river_job as holder
      where holder.unique_key = chosen.unique_key and holder.unique_states is not null
        and /* schema */ river_job_state_in_bitmask(holder.unique_states, holder.state)
        and holder.id <> chosen.id
    )
  )
), retried as (
  update /* schema */ river_job as job
  set
    -- include: job_parts.retried_values
  where job.id = any(array(select id from chosen except select id from refused))
  returning job.queue
), notified as (
  select pg_notify(
    -- include: job_parts.due_message
  )
  from (select distinct queue from retried) as waiting
  where (select pg_notification_queue_usage() < 0.9)
)
select
  (select count(*) from retried),
  (select count(*) from found where state = 'running'),
  array(select id from refused),
  array(select id from found)
from (select count(*) from notified) as done;


-- name: job_cancel_batch
-- Cancel these jobs as job_cancel does. The clients of running jobs are notified. No other client needs to know: a job
-- that is not running cannot be claimed any more when this commits.
with found as materialized (
  select id, state, queue, finalized_at
  from /* schema */ river_job
  where id = any(@batch::bigint[])
  -- include: job_filters.job_filters
  order by id
  for update skip locked
), given as (
  -- include: job_parts.cancel_mark
), cancelled as (
  update /* schema */ river_job as job
  set
    -- include: job_parts.cancelled_values
  from given
  where job.id = any(array(select id from found where finalized_at is null))
  returning job.id, job.queue, job.state
), notified as (
  select pg_notify(
    /* schema of river_job */ current_schema()::text || '.river_control',
    json_build_object('action', 'cancel', 'job_id', id, 'queue', queue)::text
  )
  from cancelled
  where state = 'running' and (select pg_notification_queue_usage() < 0.9)
)
select
  (select count(*) from cancelled),
  (select count(*) from cancelled where state = 'running'),
  '{}'::bigint[],
  array(select id from found)
from (select count(*) from notified) as done;


-- name: job_delete_batch
-- Delete these jobs, except running ones.
with found as materialized (
  select id, state
  from /* schema */ river_job
  where id = any(@batch::bigint[])
  -- include: job_filters.job_filters
  order by id
  for update skip locked
), deleted as (
  delete from /* schema */ river_job
  where id = any(array(select id from found where state <> 'running'))
  returning id
)
select
  (select count(*) from deleted),
  (select count(*) from found where state = 'running'),
  '{}'::bigint[],
  array(select id from found);


-- name: job_match_filters
-- Which of these jobs exist, and whether they pass the filters.
select id, coalesce((
  true
  -- include: job_filters.job_filters
), false)
from /* schema */ river_job
where id = any(@batch::bigint[]);
