-- What `riverpy doctor` reads. No statement writes. Each runs in a read-only transaction after `doctor_set_timeouts`.
-- Each reads a limited number of rows of a large table, and jobs only through the index on (state, queue, …).


-- name: doctor_set_timeouts
-- For this transaction only, because a pooler does not keep settings of a session.
select
  set_config('application_name', 'riverpy doctor', true),
  set_config('statement_timeout', (@statement::bigint)::text, true),
  set_config('lock_timeout', (@lock::bigint)::text, true),
  set_config('jit', 'off', true);


-- name: doctor_server
-- The server and the session. A pooler reports another process id to its clients than the server does.
select
  current_setting('server_version') as version,
  pg_is_in_recovery() as is_standby,
  current_setting('transaction_read_only')::bool as is_read_only,
  current_user::text as role,
  pg_backend_pid() as pid;


-- name: doctor_settings
-- Settings of the session without doctor's changes. Durations are in seconds. An older server lacks some.
select
  name, setting, source,
  case when unit in ('ms', 's', 'min', 'h', 'd') then extract(epoch from current_setting(name)::interval) end::float8
    as seconds
from pg_settings
where name = any(@name::text[]);


-- name: doctor_now
select clock_timestamp();


-- name: doctor_connections
-- How many connections clients have, how many they can have, and how many riverpy has.
select
  count(*) as used,
  current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint as max_connections,
  count(*) filter (where application_name ~ '^riverpy') as own
from pg_stat_activity
where datid is not null and coalesce(backend_type, 'client backend') = 'client backend';


-- name: doctor_listeners
-- The number of connections that riverpy clients have for LISTEN.
select count(*)
from pg_stat_activity
where datname = current_database() and application_name = 'riverpy listener';


-- name: doctor_notify
-- Send a notification. Only doctor itself receives it.
select pg_notify(@channel::text, @payload::text);


-- name: doctor_notification_usage
-- How full the server's notification queue is, from 0 to 1.
select pg_notification_queue_usage();


-- name: doctor_show_warnings
-- Let the open transaction receive the server's warnings.
select set_config('client_min_messages', 'warning', true);


-- name: doctor_sessions
-- The session of a process. Null: the sessions with the oldest transactions. A role may read little of other roles'
-- sessions.
select
  pid, coalesce(datname::text, '') as database, coalesce(usename::text, '') as role,
  coalesce(application_name, '') as application, coalesce(state, '') as state,
  extract(epoch from clock_timestamp() - xact_start)::float8 as seconds
from pg_stat_activity
where pid = coalesce(@pid::int, pid) and pid <> pg_backend_pid() and (xact_start is not null or @pid::int is not null)
  and coalesce(backend_type, 'client backend') = 'client backend'
order by xact_start
limit 3;


-- name: doctor_relations
-- The privileges of this role on each table and sequence of River and riverpy.
select
  class.relname::text as name,
  array(
    select given.privilege
    from unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) as given (privilege)
    where class.relkind <> 'S' and has_table_privilege(class.oid, given.privilege)
  )
  || case when class.relkind = 'S' and has_sequence_privilege(class.oid, 'USAGE') then array['USAGE'] else '{}' end
  || case
    when class.relname = 'river_job' and class.relkind <> 'S' and has_column_privilege(class.oid, 'kind', 'UPDATE')
    then array['UPDATE (kind)']
    else '{}'
  end as privileges,
  pg_has_role(class.relowner, 'USAGE') as is_owner
from pg_catalog.pg_class as class
join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
where namespace.nspname = @schema and class.relkind in ('r', 'p', 'S') and class.relname ~ '^river(py)?_'
order by class.relname;


-- name: doctor_schema
-- The privileges of this role on the schema.
select given.privilege
from pg_catalog.pg_namespace as namespace
cross join unnest(array['USAGE', 'CREATE']) as given (privilege)
where namespace.nspname = @schema and has_schema_privilege(namespace.oid, given.privilege);


-- name: doctor_running
-- The running jobs, grouped by the client of the last claim, queue, kind, and whether the client reports them as stuck:
-- how many run for at least @long seconds, and the id of the oldest one. In the order of an index: without an order,
-- the limit makes a sequential scan look cheap to the planner. The clients of the @skipped jobs are not read, because
-- these jobs are damaged.
with found as materialized (
  select
    id, kind, queue, attempted_at,
    case when id <> all(@skipped::bigint[]) then attempted_by[array_upper(attempted_by, 1)] end as client_id
  from /* schema */ river_job
  where state = 'running'
  order by queue, priority, scheduled_at, id
  limit @limit::bigint
), stuck as materialized (
  select distinct client_id, id from unnest(@client_id::text[], @id::bigint[]) as given (client_id, id)
)
select
  found.client_id, found.kind, found.queue, stuck.id is not null as is_stuck, count(*) as jobs,
  count(*) filter (where found.attempted_at <= now() - @long::float8 * interval '1 second') as long,
  coalesce(extract(epoch from now() - /* finite */ (min(found.attempted_at))), 0)::float8 as longest,
  (array_agg(found.id order by found.attempted_at, found.id))[1] as id
from found
left join stuck on stuck.client_id = found.client_id and stuck.id = found.id
group by found.client_id, found.kind, found.queue, stuck.id is not null
order by longest desc, id;


-- name: doctor_backlogs
-- For each queue and state of waiting jobs: how many, up to a limit, whether counting ended at the limit, and since how
-- many seconds the first job is due. The recursive query finds the pairs one by one in the index. With many pairs fewer
-- jobs of each are counted, about @total_limit in all. The first job is found for each priority.
with recursive place (state, queue) as (
  (select state, queue from /* schema */ river_job order by state, queue limit 1)
  union all
  select next.state, next.queue
  from place
  cross join lateral (
    select job.state, job.queue
    from /* schema */ river_job as job
    where (job.state, job.queue) > (place.state, place.queue)
    order by job.state, job.queue
    limit 1
  ) as next
), known as materialized (
  select state, queue from place limit 5000
), waits as materialized (
  select state, queue from known where state in ('available', 'retryable', 'scheduled')
), share as materialized (
  select least(@limit::bigint, @total_limit::bigint / greatest(count(*), 1) + 1) as jobs from waits
)
select
  waits.state::text, waits.queue, waiting.jobs,
  waiting.jobs >= (select share.jobs from share) as is_partial,
  extract(epoch from now() - /* finite */ (first.scheduled_at))::float8 as due_for
from waits
cross join lateral (
  select count(*) as jobs
  from (
    select
    from /* schema */ river_job as job
    where job.state = waits.state and job.queue = waits.queue
    limit (select share.jobs from share)
  ) as counted
) as waiting
cross join lateral (
  select min(head.scheduled_at) as scheduled_at
  from generate_series(1, 4) as given (priority)
  cross join lateral (
    select job.scheduled_at
    from /* schema */ river_job as job
    where job.state = waits.state and job.queue = waits.queue and job.priority = given.priority::smallint
    order by job.scheduled_at, job.id
    limit 1
  ) as head
) as first
order by waits.queue, waits.state;


-- name: doctor_kinds
-- The kinds among the first jobs of each given queue and state, with the id of one job; how many failed at their last
-- attempt, the fewest attempts that one of them has left, and the newest error. Times in errors are compared as texts,
-- so that a wrong format causes no error. Errors of the @skipped jobs are not read, because these jobs are damaged.
select
  first.kind, count(*) as jobs, min(first.id) as id, array_agg(distinct given.queue order by given.queue) as queues,
  count(first.error) as failed,
  min(first.attempts_left) filter (where first.error is not null) as attempts_left,
  left(
    (array_agg(first.error ->> 'error' order by (first.error ->> 'at') collate "C" desc)
      filter (where first.error is not null))[1],
    1000
  ) as error
from unnest(@states::text[], @queues::text[]) as given (state, queue)
cross join lateral (
  select
    job.kind, job.id, greatest(job.max_attempts - job.attempt, 0) as attempts_left,
    case
      when job.attempt > 0 and given.state <> 'scheduled' and job.id <> all(@skipped::bigint[])
      then job.errors[array_upper(job.errors, 1)]
    end as error
  from /* schema */ river_job as job
  where job.state = given.state::/* schema */ river_job_state and job.queue = given.queue
  order by job.priority, job.scheduled_at, job.id
  limit @limit::bigint
) as first
group by first.kind
order by first.kind
limit 1000;


-- name: doctor_discarded
-- The number of jobs of each kind that were discarded within @window seconds, among the newest @limit.
with newest as materialized (
  select kind
  from /* schema */ river_job
  where state = 'discarded' and finalized_at >= now() - @window::float8 * interval '1 second'
  order by finalized_at desc
  limit @limit::bigint
)
select kind, count(*)
from newest
group by kind
order by kind
limit 1000;


-- name: doctor_queues
-- The rows of River's queues: whether each is paused, and when a client last updated it.
select
  name,
  extract(epoch from now() - /* finite */ (paused_at))::float8 as paused_for,
  extract(epoch from now() - /* finite */ (updated_at))::float8 as touched
from /* schema */ river_queue
order by name
limit 5000;


-- name: doctor_periodic
-- The periodic jobs that are paused, late or requested. A job whose row no leader updated for two hours is unused and
-- not late.
select
  id,
  extract(epoch from now() - /* finite */ (paused_at))::float8 as paused_for,
  case when paused_at is null then extract(epoch from now() - /* finite */ (least(next_run_at, run_requested_at))) end::float8
    as late,
  updated_at >= now() - interval '2 hours' as is_used
from /* schema */ riverpy_periodic
order by id
limit 5000;


-- name: doctor_indexes
-- The indexes of River's and riverpy's tables. `estimate` is the size in bytes of a new B-tree with as many entries,
-- from the statistics of the last ANALYZE: for each entry the average width of its columns, 8 bytes before it, up to 7
-- bytes after it and 4 bytes in the page. Pages are filled to nine tenths. Null: not known.
select
  index.relname::text as name,
  part.indisvalid as is_valid,
  index.relname ~ '_cc(new|old)[0-9]*$' as is_rebuild_remnant,
  exists (
    select from pg_locks
    where
      pg_locks.locktype = 'relation'
      and pg_locks.database = (select oid from pg_database where datname = current_database())
      and pg_locks.relation = index.oid
      and pg_locks.mode in ('ShareUpdateExclusiveLock', 'AccessExclusiveLock')
      and pg_locks.pid <> pg_backend_pid()
  ) as is_building,
  pg_relation_size(index.oid) as size,
  case
    when method.amname = 'btree' and index.reltuples >= 0 and widths.columns = part.indnkeyatts
    then ceil(
      index.reltuples * (ceil((8 + widths.bytes) / 8.0) * 8 + 4)
      / ((current_setting('block_size')::int - 40) * 0.9)
    ) * current_setting('block_size')::int
  end::float8 as estimate
from pg_catalog.pg_index as part
join pg_catalog.pg_class as index on index.oid = part.indexrelid
join pg_catalog.pg_class as whole on whole.oid = part.indrelid
join pg_catalog.pg_am as method on method.oid = index.relam
join pg_catalog.pg_namespace as namespace on namespace.oid = index.relnamespace
cross join lateral (
  select count(*) as columns, coalesce(sum(stats.avg_width), 0) as bytes
  from pg_catalog.pg_attribute as attribute
  join pg_catalog.pg_stats as stats
    on stats.schemaname = namespace.nspname and stats.tablename = whole.relname and stats.attname = attribute.attname
  where attribute.attrelid = whole.oid and attribute.attnum = any(part.indkey)
) as widths
where namespace.nspname = @schema and whole.relname ~ '^river(py)?_'
order by index.relname;


-- name: doctor_table
-- The dead rows and the vacuum of the table of jobs. `made_at` is when it was made. A role without the privilege does
-- not see which table a vacuum processes, so any vacuum may be for this table.
select
  stats.n_live_tup as live, stats.n_dead_tup as dead,
  extract(epoch from now() - greatest(stats.last_vacuum, stats.last_autovacuum))::float8 as vacuumed,
  extract(
    epoch from now() - greatest(
      stats.last_vacuum, stats.last_autovacuum, pg_postmaster_start_time(), @made_at::timestamptz
    )
  )::float8 as waited,
  exists (
    select from pg_stat_progress_vacuum as vacuum
    where vacuum.datname = current_database() and coalesce(vacuum.relid, class.oid) = class.oid
  ) as is_running,
  current_setting('autovacuum')::bool and current_setting('track_counts')::bool as is_on,
  not coalesce(
    (
      select option_value::bool
      from pg_options_to_table(class.reloptions)
      where option_name = 'autovacuum_enabled'
    ),
    true
  ) as is_off_here
from pg_catalog.pg_class as class
join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
join pg_catalog.pg_stat_all_tables as stats on stats.relid = class.oid
where namespace.nspname = @schema and class.relname = 'river_job';


-- name: doctor_snapshots
-- What prevents the removal of dead rows, the oldest first: sessions, prepared transactions and replication slots. A
-- vacuum has a snapshot too, but it prevents nothing. A role without the privilege does not see the start of a
-- transaction.
select holder, id, role, application, state, seconds, transactions, text
from (
  select
    'session' as holder, activity.pid::text as id, coalesce(usename::text, '') as role,
    coalesce(application_name, '') as application, coalesce(state, '') as state,
    extract(epoch from clock_timestamp() - xact_start)::float8 as seconds,
    greatest(age(backend_xmin), age(backend_xid))::bigint as transactions,
    coalesce(left(query, 1000), '') as text
  from pg_stat_activity as activity
  where activity.pid <> pg_backend_pid()
    and (backend_xmin is not null or backend_xid is not null)
    and (datname = current_database() or backend_type = 'walsender')
    and coalesce(backend_type, '') <> 'autovacuum worker'
    and not exists (select from pg_stat_progress_vacuum as vacuum where vacuum.pid = activity.pid)
  union all
  select
    'prepared transaction', gid, owner::text, '', 'prepared',
    extract(epoch from clock_timestamp() - prepared)::float8, age(transaction)::bigint, ''
  from pg_prepared_xacts
  where database = current_database()
  union all
  select
    'replication slot', slot_name::text, '', '', case when active then 'active' else 'inactive' end, null,
    age(xmin)::bigint, ''
  from pg_replication_slots
  where xmin is not null
) as holders
order by transactions desc nulls last, seconds desc nulls last
limit 100;


-- name: doctor_locks
-- Open transactions that lock rows or tables of River, for how long, and how many sessions wait for each. Locks for
-- reading and for building an index are left out. pg_blocking_pids is called once for each waiting session, because
-- each call blocks the server's lock table for a moment.
with blocking as materialized (
  select unnest(pg_blocking_pids(pid)) as pid
  from pg_stat_activity
  where wait_event_type = 'Lock'
)
select
  activity.pid::text as id, coalesce(activity.usename::text, '') as role,
  coalesce(activity.application_name, '') as application, coalesce(activity.state, '') as state,
  extract(epoch from clock_timestamp() - activity.xact_start)::float8 as seconds,
  coalesce(left(activity.query, 1000), '') as text,
  held.tables, held.is_table,
  (select count(*) from blocking where blocking.pid = activity.pid) as waiting
from (
  select
    locks.pid,
    array_agg(distinct class.relname::text order by class.relname::text) as tables,
    bool_or(locks.mode not in ('RowShareLock', 'RowExclusiveLock')) as is_table
  from pg_locks as locks
  join pg_catalog.pg_class as class on class.oid = locks.relation
  join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
  where
    locks.locktype = 'relation'
    and locks.database = (select oid from pg_database where datname = current_database())
    and locks.granted
    and locks.mode not in ('AccessShareLock', 'ShareUpdateExclusiveLock')
    and locks.pid <> pg_backend_pid()
    and namespace.nspname = @schema
    and class.relkind in ('r', 'p')
    and class.relname ~ '^river(py)?_'
  group by locks.pid
) as held
join pg_stat_activity as activity on activity.pid = held.pid
where activity.xact_start is not null
order by seconds desc
limit 100;


-- name: doctor_references
-- The foreign keys of other tables that prevent the deletion of rows of River's and riverpy's tables.
select held.relname::text as held, referring.oid::regclass::text as referring, reference.conname::text as name
from pg_catalog.pg_constraint as reference
join pg_catalog.pg_class as held on held.oid = reference.confrelid
join pg_catalog.pg_namespace as namespace on namespace.oid = held.relnamespace
join pg_catalog.pg_class as referring on referring.oid = reference.conrelid
where reference.contype = 'f' and reference.confdeltype in ('a', 'r') and reference.conparentid = 0
  and namespace.nspname = @schema and held.relname ~ '^river(py)?_'
order by held, referring, name;
