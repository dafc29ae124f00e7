-- The statements of bare_loop.py, in the order in which it reads them.

-- name: empty
truncate river_job;

-- name: insert
-- $1: how many jobs.
insert into river_job (kind, args, max_attempts) select 'bare', '{}', 25 from generate_series(1, $1::int);

-- name: settle
vacuum (analyze) river_job;

-- name: claim
-- $1: how many at most; $2: who claims.
with due as materialized (
  select id
  from river_job
  where queue = 'default' and state = 'available' and scheduled_at <= now()
  order by priority, scheduled_at, id
  limit $1
  for update skip locked
)
update river_job as job
set
  state = 'running',
  attempt = job.attempt + 1,
  attempted_at = now(),
  attempted_by = array_append(job.attempted_by[greatest(array_length(job.attempted_by, 1) - 98, 1):], $2)
from due
where job.id = due.id
returning
  job.id, job.attempt, job.args::text, job.kind, job.metadata::text, job.queue, job.tags, job.priority,
  job.max_attempts, job.created_at, job.scheduled_at, job.attempted_at;

-- name: complete
-- $1, $2, $3: id, attempt and end of each finished job.
update river_job as job
set state = 'completed', finalized_at = done.ended
from unnest($1::bigint[], $2::smallint[], $3::timestamptz[]) as done (id, attempt, ended)
where job.id = done.id and job.attempt = done.attempt and job.state = 'running';

-- name: left
select count(*) from river_job where state <> 'completed';
