-- Statements that find jobs which the server cannot read: a damaged disk or memory fails each statement that reads a
-- damaged value, also for all other rows.


-- name: job_damage_candidates
-- The ids of the first jobs in each of the states, up to @limit of each: of jobs that have ended the newest, of others
-- those that come first in the index of claims. No wide column is read.
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
-- Read the columns that other statements read of many jobs. Fails if one of them is damaged.
select coalesce(max(length(attempted_by::text)), 0) + coalesce(max(length(errors::text)), 0)
from /* schema */ river_job
where id = any(@id::bigint[]);
