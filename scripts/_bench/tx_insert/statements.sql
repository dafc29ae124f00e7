-- Statements of the transactions by name, one statement each.

-- name: create_table
create table if not exists bench_orders (id bigserial primary key, note text not null)

-- name: order
-- $1: note. The row of the caller.
insert into bench_orders (note) values ($1)

-- name: row
-- $1: args, $2: kind, $3: queue. The bare row of a job.
insert into river_job (args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags)
values (cast($1 as jsonb), $2, 25, '{}', 1, $3, now(), 'available', '{}')
returning id

-- name: row_notify
-- $1: args, $2: kind, $3: queue. The bare row of a job, with the notification of its queue.
with job as (
  insert into river_job (args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags)
  values (cast($1 as jsonb), $2, 25, '{}', 1, $3, now(), 'available', '{}')
  returning id, queue
)
select id, pg_notify('bench_tx_insert', queue) from job
