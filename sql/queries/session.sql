-- What a session of ours is told, and asked, once it is up.


-- name: session_limit
-- Set a limit where the server knows it, and the session has none that is shorter. No row: it is not set.
select set_config(name, (@milliseconds::bigint)::text, false)
from pg_settings
where name = @name and (setting = '0' or setting::bigint > @milliseconds::bigint);


-- name: session_is_read_only
select current_setting('transaction_read_only')::bool;


-- name: session_isolation
-- Of the transaction that is open.
select current_setting('transaction_isolation');
