-- The final states of jobs in a fleet under random faults, and statements for its faults.

-- name: jobs
select
  id,
  (args ->> 'number')::bigint as number,
  kind,
  state::text as state,
  attempt::int as attempt,
  coalesce(attempted_by, '{}') as claimants,
  (extract(epoch from attempted_at) * 1000000)::bigint - 946684800000000 as claim,
  array(select (error ->> 'attempt')::int from unnest(errors) with ordinality as e (error, n) order by n) as failed,
  array(select error ->> 'error' from unnest(errors) with ordinality as e (error, n) order by n) as errors,
  array(
    select extract(epoch from (error ->> 'at')::timestamptz)::float8
    from unnest(errors) with ordinality as e (error, n)
    order by n
  ) as failed_at,
  extract(epoch from created_at)::float8 as created,
  (args ->> 'failures')::int as failures
from river_job
order by id;

-- name: unfinished
select count(*) from river_job where finalized_at is null;

-- name: endless
select id from river_job where kind = 'endless' and finalized_at is null;

-- name: lock
-- Rows that a user's transaction locks: some running and some available ones.
select id from river_job where finalized_at is null order by id limit 50 for update skip locked;

-- name: future_id
-- The next job to be inserted.
select last_value + 100 as id from river_job_id_seq;

-- name: end_sleeps
-- End the sleeps of slow rows. A sleep that meets a step of the clock would last as long as the step.
select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'PgSleep';


-- name: make_due
-- An administrator's repair after the clock was ahead: jobs that became due in that time are due now.
update river_job
set scheduled_at = now()
where state in ('available', 'retryable', 'scheduled') and scheduled_at > now() + interval '1 minute';
