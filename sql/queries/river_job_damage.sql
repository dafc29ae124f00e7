-- Statements that find jobs which the server cannot read. A statement that reads a value damaged on the disk fails
-- for all its rows.


-- name: job_damage_candidates
-- The ids of the first @limit jobs in each of the states: of finished jobs the newest, of others the first in the
-- index of claims. Wide columns are not read.
select job.id
from unnest(@state::text[]) as given (state)
cross join lateral (
  select id
  from /* schema */ river_job
  where state = given.state::/* schema */ river_job_state and finalized_at is null
  order by queue, priority, scheduled_at, id
  limit @limit::bigint
) as job
where given.state not in ('cancelled', 'completed', 'discarded')
union all
select job.id
from unnest(@state::text[]) as given (state)
cross join lateral (
  select id
  from /* schema */ river_job
  where state = given.state::/* schema */ river_job_state and finalized_at is not null
  order by finalized_at desc
  limit @limit::bigint
) as job
where given.state in ('cancelled', 'completed', 'discarded');


-- name: job_damage_check
-- Read the columns that other statements read of many jobs. It fails if one of them is damaged.
select coalesce(max(length(attempted_by::text)), 0) + coalesce(max(length(errors::text)), 0)
from /* schema */ river_job
where id = any(@id::bigint[]);
