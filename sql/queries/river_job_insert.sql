-- Inserting jobs.
--
-- Both statements return the jobs in the order of riverpy.job.JobColumn, then whether each is one that existed, then how
-- many notifications were sent; reading that number is what makes the server send them. A caller's connection may have
-- codecs of its own for any type but pseudo-types and text[], so values cross as these alone: cstring and text[], with
-- timestamps and unique keys in hexadecimal digits of the wire format.
-- On a conflict the existing row is locked and returned as it is. The predicate of the partial index is spelled out:
-- with a parameter in it a generic plan would not find the index.


-- name: job_insert
-- Jobs that differ in their args and unique keys alone.
with notified as (
  select pg_notify(
    /* schema of river_job */ current_schema()::text || '.river_insert', '{"queue": "' || queue || '"}'
  )
  from unnest(@notify::text[]) as given (queue)
  where (select pg_notification_queue_usage() < 0.9)
)
insert into /* schema */ river_job as job (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states
)
select
  given.args::jsonb, @kind::cstring::text, @max_attempts::cstring::text::smallint, @metadata::cstring::text::jsonb,
  @priority::cstring::text::smallint, @queue::cstring::text,
  coalesce(@scheduled_at::cstring::text::timestamptz, now()), @state::cstring::text::/* schema */ river_job_state,
  string_to_array(@tags::cstring::text, ','), decode(given.unique_key, 'hex'),
  @unique_states::cstring::text::bit(8)
from unnest(@args::text[], @unique_key::text[]) as given (args, unique_key)
on conflict (unique_key)
  where unique_key is not null
    and unique_states is not null
    and /* schema */ river_job_state_in_bitmask(unique_states, state)
  do update set kind = job.kind
returning
  int8out(job.id), jsonb_out(job.args), int2out(job.attempt), textout(encode(timestamptz_send(job.attempted_at), 'hex')),
  job.attempted_by, textout(encode(timestamptz_send(job.created_at), 'hex')), job.errors::text[],
  textout(encode(timestamptz_send(job.finalized_at), 'hex')), textout(job.kind), int2out(job.max_attempts),
  jsonb_out(job.metadata), int2out(job.priority), textout(job.queue), enum_out(job.state),
  textout(encode(timestamptz_send(job.scheduled_at), 'hex')), job.tags::text[], textout(encode(job.unique_key, 'hex')),
  bit_out(job.unique_states), boolout(job.xmax <> 0), (select int8out(count(*)) from notified);


-- name: job_insert_mixed
-- Jobs that differ in more than that.
with notified as (
  select pg_notify(
    /* schema of river_job */ current_schema()::text || '.river_insert', '{"queue": "' || queue || '"}'
  )
  from unnest(@notify::text[]) as given (queue)
  where (select pg_notification_queue_usage() < 0.9)
)
insert into /* schema */ river_job as job (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states
)
select
  given.args::jsonb, given.kind, given.max_attempts::smallint, given.metadata::jsonb, given.priority::smallint,
  given.queue,
  coalesce(given.scheduled_at::timestamptz, now()), given.state::/* schema */ river_job_state,
  string_to_array(given.tags, ','), decode(given.unique_key, 'hex'), given.unique_states::bit(8)
from unnest(
  @args::text[], @kind::text[], @max_attempts::text[], @metadata::text[], @priority::text[], @queue::text[],
  @scheduled_at::text[], @state::text[], @tags::text[], @unique_key::text[], @unique_states::text[]
) as given (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states
)
on conflict (unique_key)
  where unique_key is not null
    and unique_states is not null
    and /* schema */ river_job_state_in_bitmask(unique_states, state)
  do update set kind = job.kind
returning
  int8out(job.id), jsonb_out(job.args), int2out(job.attempt), textout(encode(timestamptz_send(job.attempted_at), 'hex')),
  job.attempted_by, textout(encode(timestamptz_send(job.created_at), 'hex')), job.errors::text[],
  textout(encode(timestamptz_send(job.finalized_at), 'hex')), textout(job.kind), int2out(job.max_attempts),
  jsonb_out(job.metadata), int2out(job.priority), textout(job.queue), enum_out(job.state),
  textout(encode(timestamptz_send(job.scheduled_at), 'hex')), job.tags::text[], textout(encode(job.unique_key, 'hex')),
  bit_out(job.unique_states), boolout(job.xmax <> 0), (select int8out(count(*)) from notified);


-- name: insert_notify
-- Wake the workers of these queues at the commit.
select pg_notify(
  /* schema of river_job */ current_schema()::text || '.river_insert', '{"queue": "' || queue || '"}'
)
from unnest(@notify::text[]) as given (queue)
where (select pg_notification_queue_usage() < 0.9);


-- name: insert_now
-- The time of this transaction, in hexadecimal digits of the wire format.
select textout(encode(timestamptz_send(now()), 'hex'));
