-- Inserting jobs.
--
-- Both statements return the jobs in the order of riverpy.job.JobColumn, then whether each is one that existed, then how
-- many notifications were sent; reading that number is what makes the server send them. Values cross as text, and
-- timestamps come back in the wire format, because a caller's connection may have codecs of its own.
-- On a conflict the existing row is locked and returned as it is. The predicate of the partial index is spelled out:
-- with a parameter in it a generic plan would not find the index.


-- name: job_insert
-- Jobs that differ in their args and unique keys alone.
with notified as (
  select pg_notify(
    coalesce(@schema::text, current_schema()::text) || '.river_insert', '{"queue": "' || queue || '"}'
  )
  from unnest(@notify::text[]) as given (queue)
)
insert into /* schema */ river_job as job (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states
)
select
  given.args::jsonb, @kind::text, @max_attempts::smallint, @metadata::text::jsonb, @priority::smallint, @queue::text,
  coalesce(@scheduled_at::text::timestamptz, now()), @state::text::/* schema */ river_job_state,
  string_to_array(@tags::text, ','), decode(given.unique_key, 'hex'), @unique_states::integer::bit(8)
from unnest(@args::text[], @unique_key::text[]) as given (args, unique_key)
on conflict (unique_key)
  where unique_key is not null
    and unique_states is not null
    and /* schema */ river_job_state_in_bitmask(unique_states, state)
  do update set kind = job.kind
returning
  job.id, job.args::text, job.attempt, timestamptz_send(job.attempted_at), job.attempted_by,
  timestamptz_send(job.created_at), job.errors::text[], timestamptz_send(job.finalized_at), job.kind, job.max_attempts,
  job.metadata::text, job.priority, job.queue, job.state::text, timestamptz_send(job.scheduled_at), job.tags::text[],
  job.unique_key, job.unique_states::integer, job.xmax <> 0, (select count(*) from notified);


-- name: job_insert_mixed
-- Jobs that differ in more than that.
with notified as (
  select pg_notify(
    coalesce(@schema::text, current_schema()::text) || '.river_insert', '{"queue": "' || queue || '"}'
  )
  from unnest(@notify::text[]) as given (queue)
)
insert into /* schema */ river_job as job (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states
)
select
  given.args::jsonb, given.kind, given.max_attempts, given.metadata::jsonb, given.priority, given.queue,
  coalesce(given.scheduled_at::timestamptz, now()), given.state::/* schema */ river_job_state,
  string_to_array(given.tags, ','), decode(given.unique_key, 'hex'), given.unique_states::bit(8)
from unnest(
  @args::text[], @kind::text[], @max_attempts::smallint[], @metadata::text[], @priority::smallint[], @queue::text[],
  @scheduled_at::text[], @state::text[], @tags::text[], @unique_key::text[], @unique_states::integer[]
) as given (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states
)
on conflict (unique_key)
  where unique_key is not null
    and unique_states is not null
    and /* schema */ river_job_state_in_bitmask(unique_states, state)
  do update set kind = job.kind
returning
  job.id, job.args::text, job.attempt, timestamptz_send(job.attempted_at), job.attempted_by,
  timestamptz_send(job.created_at), job.errors::text[], timestamptz_send(job.finalized_at), job.kind, job.max_attempts,
  job.metadata::text, job.priority, job.queue, job.state::text, timestamptz_send(job.scheduled_at), job.tags::text[],
  job.unique_key, job.unique_states::integer, job.xmax <> 0, (select count(*) from notified);


-- name: insert_notify
-- Wake the workers of these queues at the commit.
select pg_notify(
  coalesce(@schema::text, current_schema()::text) || '.river_insert', '{"queue": "' || queue || '"}'
)
from unnest(@notify::text[]) as given (queue);


-- name: insert_now
-- The time of this transaction, in the wire format.
select timestamptz_send(now());


-- name: insert_savepoint
savepoint riverpy_insert;


-- name: insert_savepoint_release
release savepoint riverpy_insert;


-- name: insert_savepoint_rollback
-- The savepoint itself stays, and has to be released too.
rollback to savepoint riverpy_insert;
