-- What `riverpy top` reads. No statement writes. Each reads a limited number of rows of any table: counts end at a cap,
-- and every search uses an index.


-- name: top_set_timeout
-- For this transaction only, because a pooler does not keep settings of a session. An index scan ends at the cap, while
-- a bitmap scan or a sequential scan reads everything first. The planner would choose one for a queue that was small at
-- the last ANALYZE.
select
  set_config('statement_timeout', @milliseconds::bigint::text, true),
  set_config('enable_bitmapscan', 'off', true),
  set_config('enable_seqscan', 'off', true),
  set_config('jit', 'off', true),
  set_config('application_name', 'riverpy top', true);


-- name: top_kinds
-- The kinds of available jobs that no client with a recent heartbeat has, among the first @limit jobs of each queue. No
-- row if no such client is registered, because all clients may be River's in another language. At most @kinds kinds,
-- those with the most jobs first.
with living as materialized (
  select kinds
  from /* schema */ riverpy_client
  where heartbeat_at between now() - dead_after and now() + dead_after
)
select first.kind, count(*) as jobs, array_agg(distinct given.queue order by given.queue) as queues
from unnest(@names::text[]) as given (queue)
cross join lateral (
  -- include: job_candidates.first_waiting_kinds
) as first
where exists (select from living)
  and first.kind <> all(array(select unnest(kinds) from living))
group by first.kind
order by jobs desc, first.kind
limit @kinds::bigint;


-- name: top_running
-- How many jobs each client runs, among the first @cap running jobs, and for how many seconds the oldest. The clients
-- of the @skipped jobs are not read, because these jobs are damaged.
select
  claimed.client_id, count(*) as jobs,
  coalesce(extract(epoch from now() - /* finite */ (min(claimed.attempted_at))), 0)::float8 as longest
from (
  select
    coalesce(case when id <> all(@skipped::bigint[]) then attempted_by[array_upper(attempted_by, 1)] end, '') as client_id,
    attempted_at
  from /* schema */ river_job
  where state = 'running'
  order by queue, priority, scheduled_at, id
  limit @cap::bigint
) as claimed
group by claimed.client_id
order by claimed.client_id;


-- name: top_queue_names
-- Queues that have a row or unfinished jobs, up to @limit of each. The index of each state is searched once for each
-- queue.
with recursive held (state, queue, number) as (
  select
    given.state,
    (
      select job.queue
      from /* schema */ river_job as job
      where job.state = given.state
      order by job.queue
      limit 1
    ),
    1
  from unnest(
    array['available', 'pending', 'retryable', 'running', 'scheduled']::/* schema */ river_job_state[]
  ) as given (state)
  union all
  select
    held.state,
    (
      select job.queue
      from /* schema */ river_job as job
      where job.state = held.state and job.queue > held.queue
      order by job.queue
      limit 1
    ),
    held.number + 1
  from held
  where held.queue is not null and held.number < @limit::bigint
), named as (
  select queue.name
  from /* schema */ river_queue as queue
  order by queue.name
  limit @limit::bigint
)
select name from named
union
select queue from held where queue is not null
order by name;


-- name: top_queues
-- For each queue, also without jobs: the jobs in each state, up to @cap; those that should have become available more
-- than @late seconds ago; when the oldest due job became due; and how many of the first @read jobs of each state started
-- and failed since @since. Counts read only the index. A failed attempt also counts as started. A failure is found by
-- the last error of the row. Times in errors are compared as texts, so that a wrong format causes no error. Errors are
-- large, so those of waiting jobs are read only if the attempt began at most ten minutes earlier. Errors of the
-- @skipped jobs are not read, because these jobs are damaged.
select
  given.name,
  queue.paused_at is not null as is_paused,
  available.number as available,
  running.number as running,
  scheduled.number as scheduled,
  retryable.number as retryable,
  scheduled.late + retryable.late as late,
  /* finite */ (oldest.due_at) as due_at,
  recent.started + recent.failed as started,
  recent.failed as failed
from unnest(@name::text[]) as given (name)
left join /* schema */ river_queue as queue on queue.name = given.name
cross join lateral (
  select count(*) as number
  from (
    select from /* schema */ river_job as job
    where job.state = 'available' and job.queue = given.name
    order by job.priority, job.scheduled_at, job.id
    limit @cap::bigint
  ) as first
) as available
cross join lateral (
  select count(*) as number
  from (
    select from /* schema */ river_job as job
    where job.state = 'running' and job.queue = given.name
    order by job.priority, job.scheduled_at, job.id
    limit @cap::bigint
  ) as first
) as running
cross join lateral (
  select count(*) as number, count(*) filter (where scheduled_at < now() - @late::float8 * interval '1 second') as late
  from (
    select job.scheduled_at
    from /* schema */ river_job as job
    where job.state = 'scheduled' and job.queue = given.name
    order by job.priority, job.scheduled_at, job.id
    limit @cap::bigint
  ) as first
) as scheduled
cross join lateral (
  select count(*) as number, count(*) filter (where scheduled_at < now() - @late::float8 * interval '1 second') as late
  from (
    select job.scheduled_at
    from /* schema */ river_job as job
    where job.state = 'retryable' and job.queue = given.name
    order by job.priority, job.scheduled_at, job.id
    limit @cap::bigint
  ) as first
) as retryable
cross join lateral (
  select
    count(*) filter (where first.is_running and first.attempted_at >= @since::timestamptz) as started,
    count(*) filter (
      where (first.is_running and first.attempt > 1
          or not first.is_running and first.attempted_at >= @since::timestamptz - interval '10 minutes')
        and (first.errors[array_upper(first.errors, 1)] ->> 'at') collate "C" >= @since_text::text
    ) as failed
  from (
    select
      state.name = 'running' as is_running, job.attempt, job.attempted_at,
      case when job.id <> all(@skipped::bigint[]) then job.errors end as errors
    from unnest('{available,running,retryable}'::/* schema */ river_job_state[]) as state (name)
    cross join lateral (
      select job.id, job.attempt, job.attempted_at, job.errors
      from /* schema */ river_job as job
      where job.state = state.name and job.queue = given.name
      order by job.priority, job.scheduled_at, job.id
      limit @read::bigint
    ) as job
  ) as first
) as recent
cross join lateral (
  select min(head.scheduled_at) as due_at
  from generate_series(1, 4) as level (priority)
  cross join lateral (
    select job.scheduled_at
    from /* schema */ river_job as job
    where job.state = 'available'
      and job.queue = given.name
      and job.priority = level.priority
      and job.scheduled_at <= now()
    order by job.scheduled_at
    limit 1
  ) as head
) as oldest
order by given.name;


-- name: top_ended_jobs
-- The jobs of each queue that ended in the last @window seconds, up to @cap of each state. If the cap ends the count,
-- the time is shorter: the time of the counted jobs. Waits are those of the last attempt. A job that completed after a
-- failure in this time has started twice. Errors of the @skipped jobs are not read, because these jobs are damaged.
with ended as materialized (
  select newest.*
  from unnest(array['cancelled', 'completed', 'discarded']::/* schema */ river_job_state[]) as given (state)
  cross join lateral (
    select
      job.state, job.queue, job.finalized_at, job.attempted_at, job.scheduled_at,
      case when job.id <> all(@skipped::bigint[]) then job.errors end as errors
    from /* schema */ river_job as job
    where job.state = given.state and job.finalized_at >= now() - @window::float8 * interval '1 second'
    order by job.finalized_at desc
    limit @cap::bigint
  ) as newest
), span as (
  select greatest(
    now() - @window::float8 * interval '1 second',
    max(of_state.oldest) filter (where of_state.number >= @cap::bigint)
  ) as since
  from (
    select state, count(*) as number, min(finalized_at) as oldest
    from ended
    group by state
  ) as of_state
)
select
  /* finite */ (span.since) as since,
  greatest(extract(epoch from now() - /* finite */ (span.since)), 0.001)::float8 as seconds,
  ended.queue,
  count(*) filter (where ended.state = 'completed') as completed,
  count(*) filter (where ended.attempted_at >= span.since) + count(*) filter (where again.failed) as started,
  count(*) filter (where ended.state = 'discarded' or again.failed) as failed,
  percentile_cont(0.95) within group (
    order by greatest(
      extract(epoch from /* finite */ (ended.attempted_at) - /* finite */ (ended.scheduled_at)), 0
    )::float8
  ) filter (where ended.attempted_at >= span.since) as wait_p95
from span
left join ended on ended.finalized_at >= span.since
cross join lateral (
  select
    ended.state = 'completed'
    and (ended.errors[array_upper(ended.errors, 1)] ->> 'at') collate "C"
      >= to_char(/* finite */ (span.since) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS') as failed
) as again
group by span.since, ended.queue
order by ended.queue;


-- name: top_leases
-- Among the first @limit leases by name that start with @prefix: how many there are, those that are held, and those that
-- expired less than a day ago. A released lease expired long ago. Whether they have a holder, by the rule of
-- lease_acquire. One row without a lease if there is none.
with first as materialized (
  select lease.*
  from /* schema */ riverpy_lease as lease
  where starts_with(lease.name, @prefix::text)
  order by lease.name
  limit @limit::bigint
), total as (
  select count(*) as number from first
)
select
  total.number, first.name, first.holder, first.epoch, /* finite */ (first.acquired_at) as acquired_at,
  extract(epoch from now() - /* finite */ (first.acquired_at))::float8 as held,
  extract(epoch from /* finite */ (first.expires_at) - now())::float8 as remaining,
  first.expires_at >= now() and first.expires_at <= now() + 2 * first.ttl as is_held
from total
left join first on first.expires_at > now() - interval '1 day'
order by first.name;


-- name: top_totals
-- The number of jobs in each state that is not counted by queue, up to @cap. Of the final states, the newest are
-- counted: the oldest may be deleted at this time, and the server would read what is left of them in the index.
select 'pending' as state, count(*) as number
from (
  select from /* schema */ river_job as job
  where job.state = 'pending'
  order by job.queue, job.priority, job.scheduled_at, job.id
  limit @cap::bigint
) as first
union all
select given.state::text, counted.number
from unnest(array['cancelled', 'completed', 'discarded']::/* schema */ river_job_state[]) as given (state)
cross join lateral (
  select count(*) as number
  from (
    select from /* schema */ river_job as job
    where job.state = given.state and job.finalized_at is not null
    order by job.finalized_at desc
    limit @cap::bigint
  ) as newest
) as counted;


-- name: top_read_time
-- The server's time, and about how many jobs there are, as of the last ANALYZE. Null before the first one.
select
  now() as at,
  (
    select nullif(reltuples, -1)::bigint
    from pg_catalog.pg_class
    where oid = to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'river_job')
  ) as about;
