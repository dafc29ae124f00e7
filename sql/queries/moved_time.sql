-- Statements of tests that move the times of rows, as if time had passed. The values are texts, because the connection
-- of the caller may have its own codecs.


-- name: move_times_of_jobs_into_past
-- Move all times of all jobs into the past: those of @ids by their durations in @moves, and all others by @by.
with moved as materialized (
  select job.id, coalesce(given.by::interval, @by::text::interval) as by
  from /* schema */ river_job as job
  left join unnest(@ids::text[], @moves::text[]) as given (id, by) on job.id = given.id::bigint
)
update /* schema */ river_job as job
set
  created_at = /* finite */ (job.created_at) - moved.by,
  scheduled_at = /* finite */ (job.scheduled_at) - moved.by,
  attempted_at = /* finite */ (job.attempted_at) - moved.by,
  finalized_at = /* finite */ (job.finalized_at) - moved.by,
  metadata = case
    when jsonb_typeof(job.metadata -> 'riverpy:expires_at') = 'string' then job.metadata || jsonb_build_object(
      'riverpy:expires_at',
      to_char(
        ((job.metadata ->> 'riverpy:expires_at')::timestamptz - moved.by) at time zone 'UTC',
        'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
      )
    )
    else job.metadata
  end
from moved
where job.id = moved.id;


-- name: move_times_of_periodic_jobs_into_past
-- Move all times of all periodic jobs into the past.
update /* schema */ riverpy_periodic
set
  next_run_at = /* finite */ (next_run_at) - @by::text::interval,
  last_run_at = /* finite */ (last_run_at) - @by::text::interval,
  paused_at = /* finite */ (paused_at) - @by::text::interval,
  resumed_at = /* finite */ (resumed_at) - @by::text::interval,
  run_requested_at = /* finite */ (run_requested_at) - @by::text::interval,
  updated_at = /* finite */ (updated_at) - @by::text::interval;


-- name: find_next_periodic_run
-- The microseconds until the next due time of these periodic jobs, or null.
select ceil(extract(epoch from min(/* finite */ (next_run_at)) - now()) * 1000000)::bigint::text
from /* schema */ riverpy_periodic
where id = any(@ids::text[]) and paused_at is null;
