-- Statements for code that waits for the end of jobs.
--
-- A job with the metadata key `riverpy:notify` is waited for. The client that ends it notifies the topic riverpy_job.


-- name: wait_states
-- The states of the given jobs that exist, and whether their end is notified.
select id, state::text, metadata -> 'riverpy:notify' is not null
from /* schema */ river_job
where id = any(@id::bigint[]);


-- name: wait_states_and_mark
-- The same, and mark the jobs that no client has claimed yet. A claim passes over rows that this statement has locked,
-- so the clients of their queues are notified. A row that another session has locked is not marked.
with waiting as materialized (
  select id
  from /* schema */ river_job
  where id = any(@id::bigint[]) and state in ('available', 'pending', 'retryable', 'scheduled')
    and jsonb_typeof(metadata) = 'object' and metadata -> 'riverpy:notify' is null
  order by id
  for no key update skip locked
), marked as (
  update /* schema */ river_job as job
  set metadata = job.metadata || '{"riverpy:notify": true}'
  where job.id = any(array(select id from waiting))
  returning job.id, job.queue, job.state
), notified as (
  select pg_notify(
    -- include: job_parts.due_message
  )
  from (select distinct queue from marked where state = 'available') as waiting_queue
  where (select pg_notification_queue_usage() < 0.9)
)
select job.id, job.state::text, job.metadata -> 'riverpy:notify' is not null or marked.id is not null
from /* schema */ river_job as job
left join marked on marked.id = job.id
where job.id = any(@id::bigint[]) and (select count(*) from notified) >= 0;


-- name: wait_notify
-- Notify the clients that wait for jobs. Each payload has the ids and states of jobs that have ended.
select pg_notify(/* schema of river_job */ current_schema()::text || '.riverpy_job', payload)
from unnest(@payload::text[]) as given (payload)
where (select pg_notification_queue_usage() < 0.9);
