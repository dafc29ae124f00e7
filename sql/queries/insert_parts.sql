-- Text that the statements that insert jobs share.


-- name: insert_begin
with notified as (
  -- include: river_notification.insert_notify
)
insert into /* schema */ river_job as job (
  args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags, unique_key, unique_states
);


-- name: on_conflict
-- The predicate of the partial index is spelled out: with a parameter in it, a generic plan would not find the index.
on conflict (unique_key)
  where unique_key is not null
    and unique_states is not null
    and /* schema */ river_job_state_in_bitmask(unique_states, state);


-- name: columns
-- The columns of a job in the order of riverpy.job.JobColumn.
int8out(job.id), jsonb_out(job.args), int2out(job.attempt), textout(encode(timestamptz_send(job.attempted_at), 'hex')),
job.attempted_by, textout(encode(timestamptz_send(job.created_at), 'hex')), job.errors::text[],
textout(encode(timestamptz_send(job.finalized_at), 'hex')), textout(job.kind), int2out(job.max_attempts),
jsonb_out(job.metadata), int2out(job.priority), textout(job.queue), enum_out(job.state),
textout(encode(timestamptz_send(job.scheduled_at), 'hex')), job.tags::text[], textout(encode(job.unique_key, 'hex')),
bit_out(job.unique_states);


-- name: plain_columns
-- The columns of a new job without a unique key.
args, kind, max_attempts, metadata, priority, queue, scheduled_at, state, tags;


-- name: one_job
-- The values of these columns for one job that does not expire.
values (
  @args::cstring::text::jsonb, @kind::cstring::text, @max_attempts::cstring::text::smallint,
  @metadata::cstring::text::jsonb, @priority::cstring::text::smallint, @queue::cstring::text,
  coalesce(@scheduled_at::cstring::text::timestamptz, now()), @state::cstring::text::/* schema */ river_job_state,
  string_to_array(@tags::cstring::text, ',')
);


-- name: own_notification
-- Notify the job's queue if it is given, and return the number of notifications.
, int8out(case
  when cardinality(@notify::text[]) > 0 and pg_notification_queue_usage() < 0.9 and pg_notify(
    -- include: job_parts.insert_message
  ) is not null
  then 1
  else 0
end);


-- name: plain_values
-- The values of these columns, from `given`. The metadata have the time at which the job expires.
given.args::jsonb, given.kind, given.max_attempts::smallint,
case
  when given.expires_in is null then given.metadata::jsonb
  else given.metadata::jsonb || jsonb_build_object(
    'riverpy:expires_at',
    to_char(
      (now() + given.expires_in::bigint * interval '1 microsecond') at time zone 'UTC',
      'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
    )
  )
end,
given.priority::smallint, given.queue, coalesce(given.scheduled_at::timestamptz, now()),
given.state::/* schema */ river_job_state, string_to_array(given.tags, ',');


-- name: raw_columns
-- The columns of a job in the order of riverpy.job.JobColumn, for a connection with raw timestamps.
job.id, job.args::text, job.attempt, job.attempted_at, job.attempted_by, job.created_at, job.errors::text[],
job.finalized_at, job.kind, job.max_attempts, job.metadata::text, job.priority, job.queue, job.state::text,
job.scheduled_at, job.tags, job.unique_key, job.unique_states::int;
