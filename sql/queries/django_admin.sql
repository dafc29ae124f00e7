-- Statements for the pages of Django's admin.


-- name: admin_kinds
-- Up to @limit kinds of stored jobs. The index is searched once for each kind.
with recursive held (kind, number) as (
  select (select min(job.kind) from /* schema */ river_job as job), 1
  union all
  select (select min(job.kind) from /* schema */ river_job as job where job.kind > held.kind), held.number + 1
  from held
  where held.kind is not null and held.number < @limit::bigint
)
select kind from held where kind is not null;
