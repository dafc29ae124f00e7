-- Statements for events of the fleet (all clients of a schema), and for watched jobs.


-- name: fleet_notify
-- Send notifications on a topic of ours. No row: nothing was sent, because the queue of notifications is too full.
--
-- A commit with a notification holds a lock that all such commits of the server wait for. These notifications may be
-- lost, so their commit does not wait for the disk while it has the lock.
with settings as materialized (
  select set_config('synchronous_commit', 'off', true)
)
select pg_notify(/* schema of river_job */ current_schema()::text || '.' || @topic::text, payload)
from unnest(@payload::text[]) as given (payload)
where (select count(*) from settings) = 1 and (select pg_notification_queue_usage() < 0.9);


-- name: fleet_changed_jobs
-- The watched jobs whose rows are not the given versions, and those that do not exist. A version is the transaction
-- that wrote the row. A missing row has no version.
select
  watched_id,
  job.xmin::text,
  -- include: job_parts.columns
from unnest(@id::bigint[], @version::text[]) as given (watched_id, known_version)
left join /* schema */ river_job as job on job.id = watched_id and job.id = any(@id::bigint[])
where job.id is null or job.xmin::text <> known_version;


-- name: fleet_ended_jobs
-- What an event says about jobs whose attempts a leader has ended.
select
  id, kind, queue, priority, attempt, max_attempts, timestamptz_send(created_at), timestamptz_send(scheduled_at),
  timestamptz_send(attempted_at), timestamptz_send(finalized_at), errors[array_upper(errors, 1)]::text
from /* schema */ river_job
where id = any(@id::bigint[]);
