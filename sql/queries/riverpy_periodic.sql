-- Statements on our table of periodic jobs. A fenced transaction commits only during the term of its leader.
--
-- Only the server's clock decides what is due. Statements that write skip locked rows, and their callers try these
-- again later.


-- name: periodic_exists
-- Whether the table exists.
select to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'riverpy_periodic') is not null;


-- name: periodic_list
-- All rows.
select
  id, schedule, /* finite */ (next_run_at) as next_run_at, /* finite */ (last_run_at) as last_run_at,
  /* finite */ (paused_at) as paused_at, /* finite */ (run_requested_at) as run_requested_at
from /* schema */ riverpy_periodic
order by id;


-- name: periodic_ids
-- All ids.
select id
from /* schema */ riverpy_periodic
order by id;


-- name: periodic_get
-- One row.
select
  id, schedule, /* finite */ (next_run_at) as next_run_at, /* finite */ (last_run_at) as last_run_at,
  /* finite */ (paused_at) as paused_at, /* finite */ (run_requested_at) as run_requested_at
from /* schema */ riverpy_periodic
where id = @id;


-- name: periodic_register
-- In a fenced transaction. Insert missing rows. An existing row keeps its next due time, unless its schedule has changed.
-- Rows in @first run at once when they are inserted, rows in @each whenever they are registered, unless they are
-- paused. Locked rows are not returned.
with given as (
  select id, schedule, next_run_at
  from unnest(@id::text[], @schedule::text[], @next_run_at::timestamptz[]) as given (id, schedule, next_run_at)
), known as materialized (
  select periodic.id
  from /* schema */ riverpy_periodic as periodic
  where periodic.id = any(@id::text[])
  order by periodic.id
  for no key update of periodic skip locked
), updated as (
  update /* schema */ riverpy_periodic as periodic
  set
    schedule = given.schedule,
    next_run_at = case when periodic.schedule = given.schedule then periodic.next_run_at else given.next_run_at end,
    run_requested_at = case
      when periodic.paused_at is null and given.id = any(@each::text[]) then now()
      else periodic.run_requested_at
    end,
    updated_at = now()
  from given
  join known using (id)
  where periodic.id = given.id
  returning periodic.id
), made as (
  insert into /* schema */ riverpy_periodic (id, schedule, next_run_at, run_requested_at)
  select given.id, given.schedule, given.next_run_at,
    case when given.id = any(@first::text[]) or given.id = any(@each::text[]) then now() end
  from given
  where not exists (select from /* schema */ riverpy_periodic as periodic where periodic.id = given.id)
  order by given.id
  on conflict do nothing
  returning id
)
select id from updated
union all
select id from made;


-- name: periodic_due
-- The rows of these ids that have a next due time or a requested run, and the seconds until each is due, which are
-- negative if it is.
select
  id, /* finite */ (next_run_at), /* finite */ (run_requested_at), paused_at is not null as is_paused,
  /* finite */ (resumed_at), now() as looked_at,
  extract(epoch from /* finite */ (next_run_at) - now())::float8 as due_in,
  -- The row may lack the column.
  case when run_requested_at is not null then to_jsonb(periodic) ->> 'run_request' end as run_request
from /* schema */ riverpy_periodic as periodic
where id = any(@id::text[]) and (next_run_at is not null or run_requested_at is not null)
order by periodic.next_run_at, periodic.id;


-- name: periodic_store_next_due_times
-- In the fenced transaction that inserts the jobs. Store the next due times of rows that are still as they were
-- read, and return the ids of these rows.
with given as (
  select id, expected_next_run_at, expected_run_requested_at, expected_is_paused, new_next_run_at
  from unnest(
    @id::text[], @expected_next_run_at::timestamptz[], @expected_run_requested_at::timestamptz[],
    @expected_is_paused::boolean[], @new_next_run_at::timestamptz[]
  ) as given (id, expected_next_run_at, expected_run_requested_at, expected_is_paused, new_next_run_at)
), taken as materialized (
  select periodic.id
  from /* schema */ riverpy_periodic as periodic
  join given using (id)
  where /* finite */ (periodic.next_run_at) is not distinct from given.expected_next_run_at
    and /* finite */ (periodic.run_requested_at) is not distinct from given.expected_run_requested_at
    and (periodic.paused_at is not null) = given.expected_is_paused
  order by periodic.id
  for no key update of periodic skip locked
)
update /* schema */ riverpy_periodic as periodic
set
  next_run_at = given.new_next_run_at,
  run_requested_at = null,
  updated_at = now()
from given
join taken using (id)
where periodic.id = given.id
returning periodic.id;


-- name: periodic_store_last_runs
-- In the transaction of periodic_store_next_due_times, after the insert: store the newest due times whose jobs were inserted.
update /* schema */ riverpy_periodic as periodic
set last_run_at = given.ran_at
from unnest(@id::text[], @ran_at::timestamptz[]) as given (id, ran_at)
where periodic.id = given.id;


-- name: periodic_mark_used
-- In a fenced transaction. Store that these ids are in use.
with kept as materialized (
  select id
  from /* schema */ riverpy_periodic
  where id = any(@id::text[])
  order by id
  for no key update skip locked
)
update /* schema */ riverpy_periodic as periodic
set updated_at = now()
from kept
where periodic.id = kept.id;


-- name: periodic_unused
-- Up to @limit ids after the given id that no client has used for @age. Paused rows are never deleted.
select id
from /* schema */ riverpy_periodic
where id > @after::text and updated_at < now() - @age::interval and paused_at is null and id <> all(@used::text[])
order by id
limit @limit::bigint;


-- name: periodic_delete_unused
-- In a fenced transaction. Delete those of the given rows that are still unused.
with unused as materialized (
  select id
  from /* schema */ riverpy_periodic
  where id = any(@id::text[]) and updated_at < now() - @age::interval and paused_at is null
  order by id
  for update skip locked
)
delete from /* schema */ riverpy_periodic as periodic
using unused
where periodic.id = unused.id
returning periodic.id;


-- name: periodic_pause
-- Pause one row. Any session may do this: periodic_store_next_due_times skips a row whose pause or request has changed since it
-- was read.
update /* schema */ riverpy_periodic
set paused_at = coalesce(paused_at, now()), updated_at = now()
where id = @id
returning id;


-- name: periodic_resume
-- Resume one row. Any session may do this, as periodic_pause. Slots before the resume get no job.
update /* schema */ riverpy_periodic
set
  resumed_at = case when paused_at is null then resumed_at else now() end,
  paused_at = null,
  updated_at = now()
where id = @id
returning id;


-- name: periodic_run
-- Request a run of one row. Any session may do this, as periodic_pause: periodic_store_next_due_times does not undo a new request.
update /* schema */ riverpy_periodic
set run_requested_at = coalesce(run_requested_at, now()), updated_at = now()
where id = @id
returning id;


-- name: periodic_has_run_requests
-- Whether the table has the column run_request.
select exists (
  select from pg_catalog.pg_attribute
  where attrelid = to_regclass(coalesce(quote_ident(@schema::text) || '.', '') || 'riverpy_periodic')
    and attname = 'run_request' and not attisdropped
);


-- name: periodic_note_run_requests
-- Store who or what requested the runs of these rows in this transaction. A run that was requested before keeps its
-- note, because one job is inserted for both requests.
update /* schema */ riverpy_periodic
set run_request = jsonb_build_object('cause', @cause::text, 'user', @user::text, 'at', now())
where id = any(@id::text[]) and run_requested_at = now();


-- name: periodic_notify
-- Notify the leader, at the commit, that a row has changed.
select pg_notify(
  /* schema of river_job */ current_schema()::text || '.riverpy_event',
  json_build_object('action', 'periodic_changed', 'periodic_job_id', @id::text)::text
)
where (select pg_notification_queue_usage() < 0.9);
