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
