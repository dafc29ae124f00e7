-- What a session of ours is told, and asked, once it is up.


-- name: session_limit
-- Set a limit where the server knows it, and the session has none that is shorter. No row: it is not set.
-- (Each read of pg_settings makes hundreds of rows.)
select set_config(@name, (@milliseconds::bigint)::text, false)
from (select current_setting(@name, true)::interval as length) as present
where length = interval '0' or length > @milliseconds::bigint * interval '1 millisecond';


-- name: session_is_read_only
select current_setting('transaction_read_only')::bool;


-- name: session_database
-- Where it leads: the database, and the schema that is searched first.
select current_database() || coalesce('.' || current_schema(), '');


-- name: session_in_savepoint
-- Whether a savepoint is open in which a row was written or locked: such a one has an id beside the transaction's.
select exists (
  select from pg_locks
  where locktype = 'transactionid' and pid = pg_backend_pid() and mode = 'ExclusiveLock'
    and transactionid <> pg_current_xact_id()::xid
);


-- name: session_isolation
-- Of the transaction that is open.
select current_setting('transaction_isolation');


-- name: session_savepoint
savepoint riverpy_call;


-- name: session_savepoint_release
release savepoint riverpy_call;


-- name: session_savepoint_rollback
-- The savepoint itself stays, and has to be released too.
rollback to savepoint riverpy_call;
