-- Statements of the bare loop of scripts/bench wait.


-- name: insert
insert into river_job (kind, args, max_attempts, queue)
values ('short', $1::text::jsonb, 25, 'default')
returning id


-- name: insert_and_notify
with job as (
  insert into river_job (kind, args, max_attempts, queue)
  values ('short', $1::text::jsonb, 25, 'default')
  returning id
)
select id, pg_notify(current_schema()::text || '.river_insert', '{"queue": "default"}')
from job


-- name: ended
select id, metadata ->> 'output'
from river_job
where id = any($1::bigint[]) and finalized_at is not null
