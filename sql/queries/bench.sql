-- What `riverpy bench` does beside inserting and working.


-- name: bench_job_count
select count(*) from /* schema */ river_job;


-- name: bench_truncate
truncate /* schema */ river_job;


-- name: bench_settle
-- No autovacuum and no stale statistics in the middle of the measurement.
vacuum (analyze) /* schema */ river_job;


-- name: bench_completed
-- How many jobs of the queue were completed at their first attempt.
select count(*)
from /* schema */ river_job
where queue = @queue and state = 'completed' and attempt = 1;


-- name: bench_server
-- The process of this connection on the server, and whether the connection leaves the machine.
select
  pg_backend_pid() as pid,
  coalesce(host(inet_server_addr()) in ('127.0.0.1', '::1'), true) as is_local,
  current_setting('server_version') as version;
