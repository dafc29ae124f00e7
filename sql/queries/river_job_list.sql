-- Statements that list jobs by filters. Each order has two: one returns whole jobs, in no particular order; the other
-- returns the ids of the page in their order, if the server cannot read one of the jobs.


-- name: job_list_by_id
with page as materialized (
  -- include: job_pages.job_page_by_id
)
select
  -- include: job_parts.columns
from /* schema */ river_job
where id = any(array(select id from page));


-- name: job_list_by_time
with page as materialized (
  -- include: job_pages.job_page_by_time
)
select
  -- include: job_parts.columns
from /* schema */ river_job
where id = any(array(select id from page));


-- name: job_list_by_finalized_at
with page as materialized (
  -- include: job_pages.job_page_by_finalized_at
)
select
  -- include: job_parts.columns
from /* schema */ river_job
where id = any(array(select id from page));


-- name: job_list_positions_by_id
-- include: job_pages.job_page_by_id


-- name: job_list_positions_by_time
-- include: job_pages.job_page_by_time


-- name: job_list_positions_by_finalized_at
-- include: job_pages.job_page_by_finalized_at


-- name: job_count_up_to
-- The number of jobs with these filters. Counting ends at @limit.
select count(*)
from (
  select
  from /* schema */ river_job
  where true
  -- include: job_filters.job_filters
  limit @limit::bigint
) as found;


-- name: job_count
-- The number of jobs with these filters.
select count(*)
from /* schema */ river_job
where true
-- include: job_filters.job_filters
