-- Bare statements beside calls of riverpy's client: `call_program.py`.

-- name: empty
truncate river_job, river_queue

-- name: insert_many
insert into river_job (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, unique_key, unique_states
)
select args, 'numbered', 25, '{}', priority, queue, now(), 'available', key, case when key is null then null else b'11110101' end
from unnest($1::jsonb[], $2::bytea[], $3::text[], $4::smallint[]) as job (args, key, queue, priority)
on conflict do nothing
returning *

-- name: fill
insert into river_job (args, kind, max_attempts, priority, queue, scheduled_at, state)
select '{}', 'filled', 25, 1, 'default', now(), 'available'
from generate_series(1, $1::int)
returning id

-- name: cancel
update river_job
set state = 'cancelled', finalized_at = now()
where kind = any($1::text[]) and state in ('available', 'scheduled', 'retryable', 'pending')
returning id

-- name: fill_queues
insert into river_queue (name, created_at, metadata, updated_at)
select 'queue_' || number, now(), '{}', now()
from generate_series(1, $1::int) as number

-- name: pause
with paused as (
  update river_queue
  set paused_at = now(), updated_at = now()
  where name = $1
  returning name
)
select pg_notify('bare_control', name) from paused

-- name: get
select * from river_job where id = $1
