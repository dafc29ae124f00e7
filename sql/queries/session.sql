-- Statements on a session and its transaction.


-- name: session_limit
-- Set a timeout if the server knows it and the session has no shorter one. No row: it is not set. (Reading
-- pg_settings instead would build hundreds of rows.)
select set_config(@name, (@milliseconds::bigint)::text, false)
from (select current_setting(@name, true)::interval as length) as present
where length = interval '0' or length > @milliseconds::bigint * interval '1 millisecond';


-- name: session_is_read_only
select current_setting('transaction_read_only')::bool;


-- name: session_database
-- The database, and the first schema of the search path.
select current_database() || coalesce('.' || current_schema(), '');


-- name: session_in_savepoint
-- Whether a savepoint is open in which a row was written or locked: such a savepoint has an id besides the
-- transaction's.
select exists (
  select from pg_locks
  where locktype = 'transactionid' and pid = pg_backend_pid() and mode = 'ExclusiveLock'
    and transactionid <> pg_current_xact_id()::xid
);


-- name: session_isolation
-- The isolation of the open transaction.
select current_setting('transaction_isolation');


-- name: session_savepoint
savepoint riverpy_call;


-- name: session_savepoint_release
release savepoint riverpy_call;


-- name: session_savepoint_rollback
-- The rollback keeps the savepoint, so it must be released too.
rollback to savepoint riverpy_call;


-- name: session_attempt_savepoint
savepoint riverpy_attempt;


-- name: session_attempt_rollback
rollback to savepoint riverpy_attempt;


-- name: session_now
-- The server's time.
select now();


-- name: session_set_lock_timeout
-- Set the lock timeout of the transaction, and return the one before.
with before as materialized (select current_setting('lock_timeout') as lock_timeout)
select lock_timeout, set_config('lock_timeout', @lock_timeout::text, true) from before;
