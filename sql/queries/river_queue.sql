-- Statements on River's table of queues.


-- name: queue_upsert
-- Insert missing rows of the queues, update the others, and return which of them are paused.
insert into /* schema */ river_queue as queue (name, created_at, metadata, updated_at)
select name, now(), '{}', now()
from unnest(@name::text[]) as given (name)
order by name
on conflict (name) do update set updated_at = excluded.updated_at
returning queue.name, queue.paused_at is not null as paused;


-- name: queue_paused
-- The given queues that are paused.
select name
from /* schema */ river_queue
where name = any(@name::text[]) and paused_at is not null;


-- name: queue_pause
-- Pause one queue, or all with `*`. A paused queue stays as it is.
update /* schema */ river_queue
set
  paused_at = coalesce(paused_at, now()),
  updated_at = case when paused_at is null then now() else updated_at end
where name = @name or @name = '*'
returning name;


-- name: queue_resume
-- Resume one queue, or all with `*`. A queue that is not paused stays as it is.
update /* schema */ river_queue
set
  updated_at = case when paused_at is not null then now() else updated_at end,
  paused_at = null
where name = @name or @name = '*'
returning name;


-- name: queue_get
select name, timestamptz_send(created_at), metadata::text, timestamptz_send(paused_at), timestamptz_send(updated_at)
from /* schema */ river_queue
where name = @name;


-- name: queue_list
select name, timestamptz_send(created_at), metadata::text, timestamptz_send(paused_at), timestamptz_send(updated_at)
from /* schema */ river_queue
order by name
limit @limit::bigint;


-- name: queue_update
-- Replace the metadata of a queue.
update /* schema */ river_queue
set metadata = @metadata::text::jsonb, updated_at = now()
where name = @name
returning
  name, timestamptz_send(created_at), metadata::text, timestamptz_send(paused_at), timestamptz_send(updated_at);


-- name: queue_unused
-- Up to @limit queues after the given name that no client has worked, paused or changed for @age. Paused queues and
-- queues with metadata are left out.
select name
from /* schema */ river_queue
where name > @after::text and updated_at < now() - @age::interval and paused_at is null and metadata = '{}'
  -- queues: name
order by name
limit @limit::bigint;


-- name: queue_delete_unused
-- Delete those given queues that are still unused. Safe when two leaders run it at once: locked rows are
-- skipped.
delete from /* schema */ river_queue
where name = any(array(
  select name
  from /* schema */ river_queue
  where name = any(@names::text[])
    and updated_at < now() - @age::interval and paused_at is null and metadata = '{}'
  order by name
  for update skip locked
))
returning name;


-- name: control_notify
select pg_notify(/* schema of river_job */ current_schema()::text || '.river_control', @payload::text)
where (select pg_notification_queue_usage() < 0.9);


-- name: queue_lag
-- The seconds for which the oldest due job of each queue has waited. 0: no job waits. The index of claims is searched
-- once for each queue and priority.
select
  given.queue,
  greatest(max(extract(epoch from now() - /* finite */ (greatest(oldest.scheduled_at, oldest.created_at)))), 0)::float8
from unnest(@name::text[]) as given (queue)
cross join generate_series(1, 4) as level (priority)
left join lateral (
  select job.scheduled_at, job.created_at
  from /* schema */ river_job as job
  where job.state = 'available'
    and job.queue = given.queue
    and job.priority = level.priority
    and job.scheduled_at <= now()
  order by job.scheduled_at
  limit 1
) as oldest on true
group by given.queue;


-- name: queue_waiting
-- Up to @limit queues that have available jobs and are not paused. The index is searched once for each queue.
with recursive held (queue, number) as (
  select (select min(job.queue) from /* schema */ river_job as job where job.state = 'available'), 1
  union all
  select
    (select min(job.queue) from /* schema */ river_job as job where job.state = 'available' and job.queue > held.queue),
    held.number + 1
  from held
  where held.queue is not null and held.number < @limit::bigint
)
select held.queue
from held
where held.queue is not null
  and not exists (
    select from /* schema */ river_queue as queue where queue.name = held.queue and queue.paused_at is not null
  );
