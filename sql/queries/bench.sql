-- The statements of `riverpy bench`.


-- name: bench_job_count
select count(*) from /* schema */ river_job;


-- name: bench_truncate
truncate /* schema */ river_job;


-- name: bench_settle
-- So that no autovacuum runs and no statistics are outdated during the measurement.
vacuum (analyze) /* schema */ river_job;


-- name: bench_completed
-- The number of jobs of the queue that were completed at their first attempt.
select count(*)
from /* schema */ river_job
where queue = @queue and state = 'completed' and attempt = 1;


-- name: bench_server
-- The process of this connection on the server, and whether the connection stays on this machine.
select
  pg_backend_pid() as pid,
  coalesce(host(inet_server_addr()) in ('127.0.0.1', '::1'), true) as is_local,
  current_setting('server_version') as version;
