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
