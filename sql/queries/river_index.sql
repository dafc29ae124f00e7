-- Statements on the indexes of River's schema, for the reindexer.
--
-- REINDEX and DROP INDEX CONCURRENTLY run in no transaction, so nothing here is fenced by a term. What writes is safe when
-- two leaders run it at once, because it is done under `index_lock`, which one session holds at a time.


-- name: index_lock
-- Exclude every other reindexer of this schema while the session lasts. Never the form that waits: what waits holds a
-- snapshot, and a concurrent build waits for the end of that in turn.
select pg_try_advisory_lock(hashtextextended('riverpy reindex ' || relnamespace::text, 0))
from pg_class
where oid = to_regclass($name$/* schema */ river_job$name$);


-- name: index_limits
-- The limits of the session in milliseconds, 0 for none. Older servers lack some of them. A `transaction_timeout` of the role
-- would cut the session in a rebuild.
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
-- The server's clock decides when a run is due.
select now();


-- name: index_list
-- Those of the given indexes that exist, in the order given. What other backends build on the same table shows either in
-- their progress, which hides from other roles, or by the lock that a rebuild keeps on its index.
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
  ) as is_held,
  now() as read_at,
  pg_relation_size(index.oid) as size,
  coalesce(obj_description(index.oid, 'pg_class'), '') as comment,
  format('reindex index concurrently %I.%I', namespace.nspname, index.relname) as rebuild
from unnest(@name::text[]) with ordinality as given (name, place)
join pg_class as index on index.relname = given.name and index.relkind = 'i'
join pg_index on pg_index.indexrelid = index.oid
join pg_namespace as namespace on namespace.oid = index.relnamespace
where index.relnamespace = (
  select relnamespace from pg_class where oid = to_regclass($name$/* schema */ river_job$name$)
)
order by given.place;


-- name: index_artifacts
-- What rebuilds of the index left, or have not finished: a new index is named `…_ccnew`, an old one `…_ccold`, with a
-- number if that is taken, and the name of the index is cut where the whole would be longer than 63 bytes. A valid one is
-- no artifact but somebody's index. Who still builds one keeps a lock on it.
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
  format('drop index concurrently if exists %I.%I', namespace.nspname, artifact.relname) as removal
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
-- The statement that gives an index its comment, or with an empty one none.
select format('comment on index %I.%I is %L', namespace.nspname, index.relname, nullif(@comment::text, ''))
from pg_class as index
join pg_namespace as namespace on namespace.oid = index.relnamespace
where index.relname = @name::text and index.relnamespace = (
  select relnamespace from pg_class where oid = to_regclass($name$/* schema */ river_job$name$)
);
