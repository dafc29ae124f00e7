-- What the lists of the dashboard read.


-- name: job_search_by_id
-- A page of the candidates that pass the filters, in the order of the ids, and the number of candidates.
with candidate as materialized (
  -- include: job_candidates.candidates
), page as (
  -- include: job_pages.job_page_by_id
)
select page.id, page.kind, page.queue, page.time, total.number
from (select count(*) as number from candidate) as total
left join page on true;


-- name: job_search_by_time
-- The same in the order of a time.
with candidate as materialized (
  -- include: job_candidates.candidates
), page as (
  -- include: job_pages.job_page_by_time
)
select page.id, page.kind, page.queue, page.time, total.number
from (select count(*) as number from candidate) as total
left join page on true;


-- name: job_search_candidates
-- The candidates of a search.
select candidate.id from (
  -- include: job_candidates.candidates
) as candidate;


-- name: job_search_check_damage
-- Read the columns that filters read. It fails if one of them is damaged.
select max(length(args::text)), max(length(metadata::text)), max(length(errors::text)), max(length(tags::text))
from /* schema */ river_job
where id = any(@id::bigint[]);


-- name: job_count_last_errors
-- The numbers of the given jobs by kind and by the start of the last error. Errors of more than @bytes bytes as stored
-- are not read, because that is slow.
select job.kind, last.error, count(*)
from /* schema */ river_job as job
cross join lateral (
  select case when pg_column_size(job.errors) <= @bytes::bigint
    then left(job.errors[array_upper(job.errors, 1)] ->> 'error', @characters::int) end as error
) as last
where job.id = any(@id::bigint[])
group by job.kind, last.error;


-- name: kinds
-- Up to @limit kinds of stored jobs behind @after. The index is searched once for each kind.
with recursive held (kind, number) as (
  select (select min(job.kind) from /* schema */ river_job as job where job.kind > @after::text), 1
  union all
  select (select min(job.kind) from /* schema */ river_job as job where job.kind > held.kind), held.number + 1
  from held
  where held.kind is not null and held.number < @limit::bigint
)
select kind from held where kind is not null;


-- name: queue_sample_kinds
-- The kinds among the first @limit jobs of a queue in a state, in the order of claims: those with the most jobs first.
select first.kind, count(*) as jobs, sum(count(*)) over ()::bigint as total
from (
  select job.kind
  from /* schema */ river_job as job
  where job.state = @state::text::/* schema */ river_job_state and job.queue = @queue
  order by job.priority, job.scheduled_at, job.id
  limit @limit::bigint
) as first
group by first.kind
order by jobs desc, first.kind
limit @kinds::bigint;


-- name: queue_kinds_without_worker
-- For each given queue that a live client works: the kinds among its first @limit available jobs that no such client
-- has.
with living as materialized (
  select queues, kinds
  from /* schema */ riverpy_client
  where heartbeat_at between now() - dead_after and now() + dead_after and queues && @queues::text[]
)
select given.queue, waiting.kind
from unnest(@queues::text[]) as given (queue)
cross join lateral (
  select first.kind, count(*) as jobs
  from (
    -- include: job_candidates.first_waiting_kinds
  ) as first
  group by first.kind
) as waiting
where exists (select from living where given.queue = any(living.queues))
  and not exists (
    select from living where given.queue = any(living.queues) and waiting.kind = any(living.kinds)
  )
order by given.queue, waiting.jobs desc, waiting.kind
limit @kinds::bigint;


-- name: client_stuck_jobs
-- The running jobs that clients report as stuck, each with its client.
select job.id, job.kind, client.client_id
from /* schema */ riverpy_client as client
cross join lateral unnest(client.stuck) as reported (id)
join /* schema */ river_job as job on job.id = reported.id and job.state = 'running'
order by job.id
limit @limit::bigint;


-- name: client_running_jobs
-- The jobs that a client runs, those that run longest first, among the first @searched running jobs of all clients. One
-- row without a job if it runs none. An unknown client has the id ''. The clients of the @skipped jobs are not read,
-- because these jobs are damaged.
with searched as materialized (
  select id, kind, queue, attempted_at,
    coalesce(case when id <> all(@skipped::bigint[]) then attempted_by[array_upper(attempted_by, 1)] end, '') as client_id
  from /* schema */ river_job
  where state = 'running'
  order by queue, priority, scheduled_at, id
  limit @searched::bigint
)
select total.searched, total.found, shown.id, shown.kind, shown.queue, shown.started_at
from (
  select count(*) as searched, count(*) filter (where client_id = @client_id::text) as found from searched
) as total
left join lateral (
  select searched.id, searched.kind, searched.queue, /* finite */ (searched.attempted_at) as started_at
  from searched
  where searched.client_id = @client_id::text
  order by searched.attempted_at, searched.id
  limit @limit::bigint
) as shown on true;


-- name: job_neighbors
-- The jobs whose last attempt ran in a client at some time from @since to @until, except the job @id. At most @searched
-- jobs of each state are read: of the ended ones, those that ended first after @since; of the others, the first ones in
-- the order of claims. One row without a job if there is none. The clients of the @skipped jobs are not read, because
-- these jobs are damaged.
with searched as materialized (
  select ended.*
  from unnest('{completed,cancelled,discarded}'::/* schema */ river_job_state[]) as given (state)
  cross join lateral (
    select job.id, job.kind, job.queue, job.state, job.attempted_at, job.finalized_at,
      case when job.id <> all(@skipped::bigint[]) then job.attempted_by[array_upper(job.attempted_by, 1)] end
        as client_id
    from /* schema */ river_job as job
    where job.state = given.state and job.finalized_at >= @since::timestamptz
    order by job.finalized_at
    limit @searched::bigint
  ) as ended
  union all
  select waiting.*
  from unnest('{running,retryable}'::/* schema */ river_job_state[]) as given (state)
  cross join lateral (
    select job.id, job.kind, job.queue, job.state, job.attempted_at, job.finalized_at,
      case when job.id <> all(@skipped::bigint[]) then job.attempted_by[array_upper(job.attempted_by, 1)] end
        as client_id
    from /* schema */ river_job as job
    where job.state = given.state
    order by job.queue, job.priority, job.scheduled_at, job.id
    limit @searched::bigint
  ) as waiting
), found as (
  select * from searched
  where client_id = @client_id::text and id <> @id and attempted_at <= @until::timestamptz
    -- The end of an attempt that is tried again is not stored in a column: take those that began since.
    and (state <> 'retryable' or attempted_at >= @since::timestamptz)
)
select
  (select count(*) from found) as job_count,
  coalesce((select max(number) from (select count(*) as number from searched group by state) as read), 0) as read_count,
  shown.id, shown.kind, shown.queue, shown.state::text, shown.started_at, shown.ended_at
from (select 1) as one
left join (
  select id, kind, queue, state, /* finite */ (attempted_at) as started_at, /* finite */ (finalized_at) as ended_at
  from found
  order by attempted_at desc, id desc
  limit @limit::bigint
) as shown on true;


-- name: periodic_rows
-- The periodic jobs by id, or one of them. A row is used if a leader updated it in the last two hours.
select
  id, schedule, /* finite */ (next_run_at) as next_run_at, /* finite */ (last_run_at) as last_run_at,
  /* finite */ (paused_at) as paused_at, /* finite */ (run_requested_at) as run_requested_at,
  /* finite */ (updated_at) as updated_at, updated_at >= now() - interval '2 hours' as is_used
from /* schema */ riverpy_periodic
where @id::text is null or id = @id::text
order by id
limit @limit::bigint;


-- name: periodic_newest_jobs
-- The newest job of each periodic job and each cause of its runs, among the newest @searched jobs of the table. Metadata
-- of more than 4 kB are not read, because that is slow.
with newest as materialized (
  select
    id, kind, queue, state,
    case when pg_column_size(metadata) <= 4096 then metadata end as metadata
  from /* schema */ river_job
  order by id desc
  limit @searched::bigint
), inserted as (
  select id, kind, queue, state, metadata ->> 'river:periodic_job_id' as periodic_job_id,
    metadata -> 'riverpy:periodic_run' as run
  from newest
)
select distinct on (periodic_job_id, run ->> 'cause') periodic_job_id, id, kind, queue, state::text, run::text
from inserted
where periodic_job_id = any(@periodic_job_ids::text[])
order by periodic_job_id, run ->> 'cause', id desc;


-- name: periodic_job_of_due_time
-- The job that was inserted for a due time of a periodic job. Such a job is due at this time, until it is tried again. The
-- index of claims is searched once for each state, queue and priority.
select job.id, job.kind, job.queue, job.state::text, job.metadata ->> 'riverpy:periodic_run'
from unnest(enum_range(null::/* schema */ river_job_state)) as given (state)
cross join unnest(@queues::text[]) as named (queue)
cross join generate_series(1, 4) as level (priority)
cross join lateral (
  select id, kind, queue, state, metadata
  from /* schema */ river_job
  where state = given.state
    and queue = named.queue
    and priority = level.priority
    and scheduled_at = @due_at::timestamptz
  limit 100
) as job
where job.metadata ->> 'river:periodic_job_id' = @periodic_job_id
order by job.id desc
limit 1;
