-- What a session of ours is told, and asked, once it is up.


-- name: session_limit
-- Set a limit where the server knows it, and the session has none that is shorter. No row: it is not set.
select set_config(name, (@milliseconds::bigint)::text, false)
from pg_settings
where name = @name and (setting = '0' or setting::bigint > @milliseconds::bigint);


-- name: session_is_read_only
select current_setting('transaction_read_only')::bool;


-- name: session_database
-- Where it leads: the database, and the schema that is searched first.
select current_database() || coalesce('.' || current_schema(), '');


-- name: session_isolation
-- Of the transaction that is open.
select current_setting('transaction_isolation');
