-- Parts of the statements that list jobs: the ids of one page, with what its cursor needs.
--
-- With a limit in sight the planner may read the table in the order of the ids until it has found enough jobs. That is
-- slow if few jobs pass the filters, or if they are all at the end of the table. `offset 0` hides the limit, so that an
-- index of the filters is used. riverpy/_calls/job_page.py decides when it is there.


-- name: job_page_by_id
-- A page in the order of the ids.
select id, kind, queue, null::bytea as time
from (
  select id, kind, queue
  from /* schema */ river_job
  where true
  -- include: job_filters.job_filters
  -- when fenced: offset 0
) as found
where true
-- when after_id_ascending: and id > @after_id::bigint
-- when after_id_descending: and id < @after_id::bigint
order by
-- when ascending: id
-- when descending: id desc
limit @limit::bigint


-- name: job_page_by_time
-- A page in the order of one of the times. An empty time comes last in ascending order and first in descending order.
select id, kind, queue, timestamptz_send(time) as time
from (
  select id, kind, queue,
  -- when by_scheduled_at: scheduled_at as time
  -- when by_attempted_at: attempted_at as time
  -- when by_finalized_at: finalized_at as time
  from /* schema */ river_job
  where true
  -- include: job_filters.job_filters
  -- when fenced: offset 0
) as found
where true
-- when after_id_ascending: and id > @after_id::bigint
-- when after_id_descending: and id < @after_id::bigint
-- when after_time_ascending: and ((time, id) > (@after_time::text::timestamptz, @after_id::bigint) or time is null)
-- when after_time_descending: and (time, id) < (@after_time::text::timestamptz, @after_id::bigint)
-- when after_empty_ascending: and time is null and id > @after_id::bigint
-- when after_empty_descending: and (time is not null or id < @after_id::bigint)
order by
-- when ascending: time, id
-- when descending: time desc, id desc
limit @limit::bigint


-- name: job_page_by_finalized_at
-- A page of jobs in final states, in the order of their ends. The index on state and end is read once for each state,
-- up to the limit.
select job.id, job.kind, job.queue, timestamptz_send(job.time) as time
from unnest(@states::text[]) as given (final_state)
cross join lateral (
  select id, kind, queue, time
  from (
    select id, kind, queue, finalized_at as time
    from /* schema */ river_job
    where state = given.final_state::/* schema */ river_job_state and finalized_at is not null
    -- include: job_filters.job_filters
    -- when fenced: offset 0
  ) as found
  where true
  -- when after_id_ascending: and id > @after_id::bigint
  -- when after_id_descending: and id < @after_id::bigint
  -- when after_time_ascending: and (time, id) > (@after_time::text::timestamptz, @after_id::bigint)
  -- when after_time_descending: and (time, id) < (@after_time::text::timestamptz, @after_id::bigint)
  order by
  -- when ascending: time, id
  -- when descending: time desc, id desc
  limit @limit::bigint
) as job
order by
-- when ascending: job.time, job.id
-- when descending: job.time desc, job.id desc
limit @limit::bigint
