-- Text that the statements on counts of jobs share.


-- name: job_count_columns
seconds, started_at, queue, attempts, completed, failed, discarded, wait_seconds, wait_max,
waits_over_100ms, waits_over_1s, waits_over_10s, waits_over_1m, waits_over_5m


-- name: job_count_sums
sum(attempts)::bigint as attempts, sum(completed)::bigint as completed, sum(failed)::bigint as failed,
sum(discarded)::bigint as discarded, sum(wait_seconds) as wait_seconds, max(wait_max) as wait_max,
sum(waits_over_100ms)::bigint as waits_over_100ms, sum(waits_over_1s)::bigint as waits_over_1s,
sum(waits_over_10s)::bigint as waits_over_10s, sum(waits_over_1m)::bigint as waits_over_1m,
sum(waits_over_5m)::bigint as waits_over_5m


-- name: job_count_add
-- Add to the row that exists.
on conflict (seconds, started_at, queue) do update set
  attempts = counted.attempts + excluded.attempts,
  completed = counted.completed + excluded.completed,
  failed = counted.failed + excluded.failed,
  discarded = counted.discarded + excluded.discarded,
  wait_seconds = counted.wait_seconds + excluded.wait_seconds,
  wait_max = greatest(counted.wait_max, excluded.wait_max),
  waits_over_100ms = counted.waits_over_100ms + excluded.waits_over_100ms,
  waits_over_1s = counted.waits_over_1s + excluded.waits_over_1s,
  waits_over_10s = counted.waits_over_10s + excluded.waits_over_10s,
  waits_over_1m = counted.waits_over_1m + excluded.waits_over_1m,
  waits_over_5m = counted.waits_over_5m + excluded.waits_over_5m
