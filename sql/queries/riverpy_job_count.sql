-- Statements on our table of counts of jobs. Times are the server's.
--
-- Who changes rows of a period locks its row of all queues first (queue '', which sorts first). So two sessions never
-- wait for each other.


-- name: job_count_set_limits
-- Settings of the transaction that adds counts. The counts are approximate, so their commit does not wait for the disk:
-- the rows are locked for a shorter time.
select set_config('lock_timeout', @lock_timeout::text, true), set_config('synchronous_commit', 'off', true);


-- name: job_count_write
-- Add the counts of a worker to the minute in which it counted: @age seconds before the server's time. A leader may
-- write at the same time.
insert into /* schema */ riverpy_job_count as counted (
  -- include: job_count_parts.job_count_columns
)
select
  60, date_trunc('minute', now() - @age::float8 * interval '1 second', 'UTC'), given.*
from unnest(
  @queue::text[], @attempts::bigint[], @completed::bigint[], @failed::bigint[], @discarded::bigint[],
  @wait_seconds::float8[], @wait_max::float8[], @waits_over_100ms::bigint[], @waits_over_1s::bigint[],
  @waits_over_10s::bigint[], @waits_over_1m::bigint[], @waits_over_5m::bigint[]
) as given (queue)
order by given.queue collate "C"
-- include: job_count_parts.job_count_add
;


-- name: job_count_exists
-- Whether the table exists.
select to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'riverpy_job_count') is not null;


-- name: job_count_old_periods
-- Periods that the leader has to change, oldest first: minutes to add to hours, periods to delete, and periods with too
-- many queues, which ended a while ago. After a step of the clock, periods may be far in the future: they are deleted.
select seconds, to_jsonb(started_at) #>> '{}', action
from (
  select
    seconds, started_at,
    case
      when started_at < now() - @hours_kept::interval or started_at > now() + @minutes_kept::interval then 'delete'
      when seconds = 60 and started_at < now() - @minutes_kept::interval then 'add to hour'
      when count(*) > @queues_max::bigint + 2 and started_at < now() - interval '5 minutes' then 'limit queues'
    end as action
  from /* schema */ riverpy_job_count
  group by seconds, started_at
) as period
where action is not null
  and (seconds, started_at) > (@after_seconds::integer, @after_time::text::timestamptz)
order by seconds, started_at
limit @limit::bigint;


-- name: job_count_lock_periods
-- Lock the given periods, by their rows of all queues. A missing row is inserted, because only a row can be locked. The
-- transaction around it is fenced.
insert into /* schema */ riverpy_job_count as counted (
  -- include: job_count_parts.job_count_columns
)
select seconds, started_at, '', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
from unnest(@seconds::integer[], @started_at::text[]::timestamptz[]) as period (seconds, started_at)
order by seconds, started_at
on conflict (seconds, started_at, queue) do update set attempts = counted.attempts;


-- name: job_count_delete
-- Delete all rows of the given periods. The transaction around it is fenced.
delete from /* schema */ riverpy_job_count
where (seconds, started_at) in (
  select seconds, started_at from unnest(@seconds::integer[], @started_at::text[]::timestamptz[])
    as period (seconds, started_at)
);


-- name: job_count_add_to_hours
-- Move the given minutes into their hours. A minute is deleted by the statement that adds it, so it is added once,
-- however often and in whichever session this runs. The transaction around it is fenced.
with gone as materialized (
  delete from /* schema */ riverpy_job_count
  where seconds = 60 and started_at = any(@started_at::text[]::timestamptz[])
  returning
    -- include: job_count_parts.job_count_columns
)
insert into /* schema */ riverpy_job_count as counted (
  -- include: job_count_parts.job_count_columns
)
select
  3600, date_trunc('hour', started_at, 'UTC') as hour, queue,
  -- include: job_count_parts.job_count_sums
from gone
where attempts > 0
group by hour, queue
order by hour, queue
-- include: job_count_parts.job_count_add
;


-- name: job_count_limit_queues
-- Keep the busiest queues of the given periods, and add the others to the row of other queues. The transaction around
-- it is fenced.
with ranked as materialized (
  select
    counted.seconds, counted.started_at, counted.queue,
    row_number() over (
      partition by counted.seconds, counted.started_at order by counted.attempts desc, counted.queue
    ) as rank
  from unnest(@seconds::integer[], @started_at::text[]::timestamptz[]) as period (seconds, started_at)
  join /* schema */ riverpy_job_count as counted using (seconds, started_at)
  where counted.queue not in ('', '*')
), gone as materialized (
  delete from /* schema */ riverpy_job_count as counted
  using ranked
  where ranked.rank > @queues_max::bigint
    and (counted.seconds, counted.started_at, counted.queue) = (ranked.seconds, ranked.started_at, ranked.queue)
  returning counted.*
)
insert into /* schema */ riverpy_job_count as counted (
  -- include: job_count_parts.job_count_columns
)
select
  seconds, started_at, '*',
  -- include: job_count_parts.job_count_sums
from gone
group by seconds, started_at
order by seconds, started_at
-- include: job_count_parts.job_count_add
;


-- name: job_count_read
-- The counts of one queue, or of all ('') or of the others ('*'), in the last @steps steps of @step_seconds, oldest first;
-- and since when there are counts. The rows are read one by one by their key, so the number of queues does not matter.
-- An hour is the sum of its row and of the rows of its minutes, of which each is counted in one of them.
with range as materialized (
  select
    (floor(extract(epoch from now()) / @step_seconds::integer)::bigint - @steps::integer + 1)
      * @step_seconds::integer as first_second,
    (select min(started_at) from /* schema */ riverpy_job_count where seconds = 60) as first_minute,
    (select min(started_at) from /* schema */ riverpy_job_count where seconds = 3600) as first_hour
)
select
  step.second, extract(epoch from /* finite */ (least(range.first_minute, range.first_hour)))::bigint as counted_since,
  -- include: job_count_parts.job_count_sums
from range
cross join lateral generate_series(
  range.first_second, range.first_second + (@steps::integer - 1) * @step_seconds::integer, @step_seconds::integer
) as step (second)
left join lateral (
  select 60 as seconds, to_timestamp(minute.second) as started_at
  from generate_series(step.second, step.second + @step_seconds::integer - 60, 60) as minute (second)
  where to_timestamp(step.second + @step_seconds::integer) > range.first_minute
  union all
  select 3600, to_timestamp(step.second) where @step_seconds::integer = 3600
) as period on true
left join lateral (
  select counted.*
  from /* schema */ riverpy_job_count as counted
  where counted.seconds = period.seconds and counted.started_at = period.started_at and counted.queue = @queue::text
  limit 1
) as found on true
group by step.second, range.first_minute, range.first_hour
order by step.second;


-- name: job_count_read_queues
-- The attempts of each of the given queues in the last hour, in steps of @step_seconds. The newest rows are read first,
-- up to a limit. (date_part is faster than extract, which returns a numeric.)
with recent as materialized (
  select queue, started_at, attempts, failed
  from /* schema */ riverpy_job_count
  where seconds = 60 and started_at > now() - interval '1 hour' and started_at <= now()
  order by seconds desc, started_at desc, queue desc
  limit @rows_max::bigint
)
select queue, step * @step_seconds::integer as second, sum(attempts)::bigint as attempts, sum(failed)::bigint as failed
from (
  select queue, date_part('epoch', started_at)::bigint / @step_seconds::integer as step, attempts, failed
  from recent
  where queue = any(@queues::text[])
) as chosen
group by queue, step
order by queue, step;
