-- Statements of scripts/scaling. The search path is the schema of the jobs.

-- name: empty
truncate river_job;

-- name: settle
vacuum (analyze) river_job;

-- name: unfinished
select exists (select from river_job where state in ('available', 'running'));

-- name: span
select min(attempted_at), max(finalized_at), count(*) filter (where state = 'completed') from river_job;

-- name: alive
select count(*) from riverpy_client where heartbeat_at > $1;

-- name: running
select count(*) from river_job where state = 'running';

-- name: completed
select count(*) from river_job where state = 'completed';

-- name: waits
select extract(epoch from attempted_at - created_at) from river_job where state = 'completed';

-- name: wal_bytes
select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint;

-- name: index_bytes
select sum(pg_relation_size(indexrelid))::float8 / pg_relation_size('river_job'::regclass)
from pg_index
where indrelid = 'river_job'::regclass;

-- name: connections
select application_name, count(*)
from pg_stat_activity
where application_name like 'riverpy%'
group by 1
order by 1;

-- name: server
select pg_backend_pid(), current_setting('server_version');
