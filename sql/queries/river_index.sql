-- Statements on the indexes of River's schema, for the reindexer.
--
-- REINDEX and DROP INDEX CONCURRENTLY cannot run in a transaction, so no fence protects them. They are safe when
-- there are two leaders, because only the session that holds `index_lock` sends them.


-- name: index_lock
-- Lock out other reindexers of this schema until the end of the session. The lock is never waited for: a waiting
-- session holds a snapshot, and a concurrent build would wait for that snapshot.
select pg_try_advisory_lock(hashtextextended('riverpy reindex ' || relnamespace::text, 0))
from pg_class
where oid = to_regclass($name$/* schema */ river_job$name$);


-- name: index_set_timeouts
-- Set the timeouts of the session in milliseconds, 0 for none. Older servers lack some of them. A
-- `transaction_timeout` of the role would end the session during a rebuild.
select set_config(given.name, given.milliseconds::text, false)
from (
  values
    ('statement_timeout', @statement::bigint),
    ('lock_timeout', @lock::bigint),
    ('idle_session_timeout', @idle::bigint),
    ('transaction_timeout', 0)
) as given (name, milliseconds)
join pg_settings using (name);


-- name: index_now
-- The server's time, which decides when a run is due.
select now();


-- name: index_list
-- The given indexes that exist, in the given order. Builds of other sessions on the same table are found in
-- their progress, which is hidden from other roles, or by the lock that a rebuild keeps on its index.
select
  index.relname::text as name,
  pg_has_role(index.relowner, 'USAGE') as is_owner,
  exists (
    select from pg_stat_progress_create_index as progress
    where
      progress.datname = current_database()
      and progress.relid = pg_index.indrelid
      and progress.pid <> pg_backend_pid()
  ) or exists (
    select from pg_locks
    where
      pg_locks.locktype = 'relation'
      and pg_locks.database = (select oid from pg_database where datname = current_database())
      and pg_locks.relation = index.oid
      and pg_locks.mode in ('ShareUpdateExclusiveLock', 'AccessExclusiveLock')
      and pg_locks.pid <> pg_backend_pid()
  ) as is_table_busy,
  now() as read_at,
  pg_relation_size(index.oid) as size,
  coalesce(obj_description(index.oid, 'pg_class'), '') as comment,
  format('reindex index concurrently %I.%I', namespace.nspname, index.relname) as rebuild_statement
from unnest(@name::text[]) with ordinality as given (name, place)
join pg_class as index on index.relname = given.name and index.relkind = 'i'
join pg_index on pg_index.indexrelid = index.oid
join pg_namespace as namespace on namespace.oid = index.relnamespace
where index.relnamespace = (
  select relnamespace from pg_class where oid = to_regclass($name$/* schema */ river_job$name$)
)
order by given.place;


-- name: index_artifacts
-- What rebuilds of the index have left or not finished yet. A new index is named `…_ccnew` and an old one `…_ccold`,
-- with a number if that name is taken. The name of the index is cut if the whole would be longer than 63 bytes. A
-- valid index is no artifact but an index of the user. A session that is building one keeps a lock on it.
select
  artifact.relname::text as name,
  not part.indisvalid and pg_has_role(artifact.relowner, 'USAGE') and not exists (
    select from pg_locks
    where
      pg_locks.locktype = 'relation'
      and pg_locks.database = (select oid from pg_database where datname = current_database())
      and pg_locks.relation = artifact.oid
      and pg_locks.mode in ('ShareUpdateExclusiveLock', 'AccessExclusiveLock')
      and pg_locks.pid <> pg_backend_pid()
  ) as is_ownerless,
  format('drop index concurrently if exists %I.%I', namespace.nspname, artifact.relname) as drop_statement
from pg_class as index
join pg_index as whole on whole.indexrelid = index.oid
join pg_index as part on part.indrelid = whole.indrelid
join pg_class as artifact on artifact.oid = part.indexrelid
join pg_namespace as namespace on namespace.oid = index.relnamespace
cross join lateral (select regexp_replace(artifact.relname::text, '_cc(new|old)[0-9]*$', '') as name) as stem
where
  index.relname = @name::text
  and index.relnamespace = (
    select relnamespace from pg_class where oid = to_regclass($name$/* schema */ river_job$name$)
  )
  and stem.name <> artifact.relname::text
  and (
    stem.name = index.relname::text
    or (octet_length(artifact.relname::text) >= 60 and starts_with(index.relname::text, stem.name))
  )
order by artifact.relname;


-- name: index_comment
-- The statement that sets or, with an empty text, removes the comment of an index.
select format('comment on index %I.%I is %L', namespace.nspname, index.relname, nullif(@comment::text, ''))
from pg_class as index
join pg_namespace as namespace on namespace.oid = index.relnamespace
where index.relname = @name::text and index.relnamespace = (
  select relnamespace from pg_class where oid = to_regclass($name$/* schema */ river_job$name$)
);
